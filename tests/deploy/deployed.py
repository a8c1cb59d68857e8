"""The files under deploy/, read once, for the tests in this folder."""

import json
import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from geotrain.config import Config, load_config
from geotrain.configuration.rules import split_address

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
REGIONS = ("virginia", "frankfurt")

IMAGE_HOME = "/opt/geotrain"
IMAGE_FOLDERS = ("/run/geotrain", "/checkpoints")
"""What the Dockerfile makes, for volumes."""


def files() -> list[Path]:
    """Every file under deploy/."""
    found = (path for path in DEPLOY.rglob("*") if path.is_file())
    return sorted(path for path in found if "__pycache__" not in path.parts)


def documents() -> list[Path]:
    """Every document of the repository."""
    folders = (ROOT, ROOT / "docs", DEPLOY, ROOT / "transport", ROOT / "compression")
    return sorted(path for folder in folders for path in folder.glob("*.md"))


def load(path: Path) -> list[Any]:
    """The documents in a YAML, TOML or JSON file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return [tomllib.loads(text)]
    if path.suffix == ".json":
        return [json.loads(text)]
    return list(yaml.safe_load_all(text))


@cache
def compose() -> dict[str, Any]:
    (document,) = load(DEPLOY / "compose.yaml")
    return document


@cache
def kubernetes() -> dict[str, dict[str, Any]]:
    """Kind -> object."""
    objects = [one for path in sorted((DEPLOY / "kubernetes").iterdir()) for one in load(path)]
    found = {one["kind"]: one for one in objects}
    assert len(found) == len(objects)
    return found


def pod() -> dict[str, Any]:
    return kubernetes()["Job"]["spec"]["template"]["spec"]


def pod_containers() -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in (*pod()["initContainers"], *pod()["containers"])}


@cache
def site(region: str) -> Config:
    return load_config(DEPLOY / "sites" / f"{region}.toml")


def pod_site(folder: Path) -> Config:
    """The site file of the ConfigMap, checked as it lies in the pod."""
    for name, text in kubernetes()["ConfigMap"]["data"].items():
        (folder / name).write_text(text)
    return load_config(folder / "site.toml")


def port(address: str) -> int:
    return split_address(address)[1]


def dockerfile() -> list[tuple[str, str]]:
    """(instruction, the rest) of each line, continuations joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]


def mebibytes(quantity: str) -> int:
    """A memory limit such as "4Gi" (Kubernetes) or "4g" (compose)."""
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", quantity).groups()
    return int(number) * {"Mi": 1, "m": 1, "Gi": 1024, "g": 1024}[unit]
