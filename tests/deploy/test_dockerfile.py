"""The Dockerfile, without a Docker engine: instructions, sources, and what others rely on."""

import json
import re
from fnmatch import fnmatch

from deployed import DEPLOY, IMAGE_FOLDERS, IMAGE_HOME, ROOT, dockerfile, pod, port, site

KNOWN = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "CMD"}


def of(instruction: str) -> list[str]:
    return [rest for name, rest in dockerfile() if name == instruction]


def copies() -> list[tuple[list[str], str]]:
    return [(rest.split()[:-1], rest.split()[-1]) for rest in of("COPY")]


def environment() -> dict[str, str]:
    return dict(pair.split("=", 1) for rest in of("ENV") for pair in rest.split())


def test_every_instruction_is_one():
    assert {name for name, _ in dockerfile()} == KNOWN


def test_the_base_is_an_argument_before_from():
    names = [name for name, _ in dockerfile()]
    assert names[:2] == ["ARG", "FROM"]
    assert of("FROM") == ["${BASE}"]
    # An image's Python must be one that the pinned versions were chosen for.
    assert re.fullmatch(r"BASE=python:3\.11-slim-\w+", of("ARG")[0])


def test_every_source_exists_and_is_let_into_the_build():
    ignore = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignore if line.startswith("!")}
    copied = {source for sources, _ in copies() for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    assert copied == allowed
    assert "*" in ignore
    assert any(fnmatch("x/__pycache__", line) for line in ignore[-1:])


def test_it_copies_what_a_wheel_is_built_from():
    """As tests/test_packaging.py builds it, which proves that this is enough."""
    into_source = {
        s for sources, target in copies() if target.startswith("source") for s in sources
    }
    assert into_source == {
        *("pyproject.toml", "README.md", "LICENSE"),
        *("geotrain", "transport", "compression"),
    }
    targets = {target for _, target in copies()}
    assert targets > {"source/geotrain", "source/transport", "source/compression"}


def test_both_installs_keep_to_the_constraints():
    installs = [part for rest in of("RUN") for part in rest.split("&&") if "pip install" in part]
    assert len(installs) == 2
    assert all("-c constraints.txt" in install for install in installs)
    assert (["deploy/constraints.txt"], "constraints.txt") in copies()


def test_it_runs_as_a_number_that_is_not_root():
    (user,) = of("USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    uid, gid = map(int, user.split(":"))
    setup = " ".join(of("RUN"))
    assert f"useradd --uid {uid} --gid {gid}" in setup
    context = pod()["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (uid, gid, gid)
    assert f"--owner {uid} --group {gid} --mode 0700 {' '.join(IMAGE_FOLDERS)}" in setup


def test_its_environment_is_where_the_others_mount():
    assert environment()["XDG_RUNTIME_DIR"] == "/run/geotrain"
    assert environment()["GEOTRAIN_CONFIG"] == "/etc/geotrain/site.toml"
    assert environment()["PATH"] == f"{IMAGE_HOME}/venv/bin:$PATH"
    assert of("WORKDIR") == [IMAGE_HOME]


def test_the_port_is_the_one_that_sites_listen_on():
    assert of("EXPOSE") == [str(port(site("frankfurt").site.listen))]


def test_its_command_is_the_daemon_and_its_health_the_status():
    assert json.loads(of("CMD")[0]) == ["geotrain", "daemon"]
    assert json.loads(of("HEALTHCHECK")[0].partition("CMD ")[2]) == ["geotrain", "status"]
