"""Folders at the top level, import names below geotrain: what keeps that working everywhere.

`compression` is also the name of a standard package since Python 3.14, hence most of the rules.
"""

import os
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import geotrain

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("transport", "compression")
BUILD_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy, so that no build folder is left in the tree."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("geotrain", *LINKED):
        skipped = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skipped)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet"]
    done = subprocess.run(
        [*pip, "--no-deps", "--no-build-isolation", "--no-index", "-w", str(folder), str(source)],
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def git(*arguments: str) -> str | None:
    """What git says, or None outside a repository with commits."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30)
    return done.stdout if done.returncode == 0 else None


@pytest.mark.parametrize("name", LINKED)
def test_import_names_are_relative_symlinks(name):
    link = ROOT / "geotrain" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"
    assert link.resolve() == ROOT / name


@pytest.mark.skipif(
    shutil.which("git") is None or git("rev-parse", "HEAD") is None, reason="no commits to look at"
)
@pytest.mark.parametrize("name", LINKED)
def test_symlinks_are_committed_as_such(name):
    entry = git("ls-files", "--stage", f"geotrain/{name}")
    assert entry is not None
    assert entry.startswith("120000 ")


@pytest.mark.parametrize("name", LINKED)
def test_linked_folders_are_no_regular_packages(name):
    assert not (ROOT / name / "__init__.py").exists()


def test_no_module_shadows_one_of_the_standard_compression_package():
    taken = {"bz2", "gzip", "lzma", "zlib", "zstd"}
    assert not taken & {path.stem for path in (ROOT / "compression").iterdir()}


def test_build_rules(pyproject):
    assert pyproject["build-system"] == {
        "requires": ["setuptools>=77"],
        "build-backend": "setuptools.build_meta",
    }
    setuptools = pyproject["tool"]["setuptools"]
    assert setuptools["packages"]["find"] == {
        "include": ["geotrain", "geotrain.*"],
        "namespaces": True,
    }
    assert setuptools["package-data"] == {"geotrain": ["py.typed"]}
    assert pyproject["project"]["requires-python"] == ">=3.11"


def test_pytest_rules(pyproject):
    options = pyproject["tool"]["pytest"]["ini_options"]
    assert options["testpaths"] == ["tests"]
    assert options["pythonpath"] == ["."]
    asked = {"--import-mode=importlib", "--strict-markers", "--strict-config"}
    assert asked <= set(options["addopts"])
    assert options["asyncio_mode"] == "auto"
    assert options["asyncio_default_fixture_loop_scope"] == "function"
    assert options["filterwarnings"] == ["error"]


def test_checker_rules(pyproject):
    tool = pyproject["tool"]
    assert tool["mypy"]["packages"] == ["geotrain"]
    assert tool["mypy"]["strict"] is True
    ruff = tool["ruff"]
    assert ruff["line-length"] == 100
    assert ruff["lint"]["select"] == ["E", "F", "W", "I", "B", "UP", "TID", "RUF"]
    tidy = ruff["lint"]["flake8-tidy-imports"]
    assert tidy["ban-relative-imports"] == "all"
    assert set(tidy["banned-api"]) == set(LINKED)
    assert tool["coverage"]["run"] == {"source": ["geotrain", *LINKED], "branch": True}


def test_mypy_reaches_the_linked_folders(tmp_path):
    """With our settings, in a small tree of the same shape."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "geotrain").mkdir()
    (tmp_path / "geotrain" / "__init__.py").touch()
    for name in LINKED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "wrong.py").write_text('number: int = "text"\n')
        (tmp_path / "geotrain" / name).symlink_to(f"../{name}")
    done = subprocess.run(
        [sys.executable, "-m", "mypy"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=BUILD_TIMEOUT_S,
    )
    assert done.returncode == 1, done.stderr
    for name in LINKED:
        assert f"geotrain/{name}/wrong.py:1: error: Incompatible types" in done.stdout


def test_wheel_has_one_top_level_name(wheel):
    top = {name.split("/")[0] for name in wheel.namelist()}
    (info,) = {name for name in top if name.endswith(".dist-info")}
    assert top - {info} == {"geotrain"}
    assert wheel.read(f"{info}/top_level.txt").split() == [b"geotrain"]


def test_wheel_holds_every_module_once(wheel):
    expected = {"geotrain/py.typed"}
    for folder, prefix in (("geotrain", "geotrain"), *((n, f"geotrain/{n}") for n in LINKED)):
        for path in (ROOT / folder).rglob("*.py"):
            inner = path.relative_to(ROOT / folder)
            if folder != "geotrain" or inner.parts[0] not in LINKED:
                expected.add(f"{prefix}/{inner.as_posix()}")
    found = [name for name in wheel.namelist() if name.startswith("geotrain/")]
    assert sorted(found) == sorted(expected)


def test_wheel_works_without_the_tree(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = (
        "import gzip, geotrain.config, geotrain.transport.frame, geotrain.compression.host_zstd\n"
        "print(geotrain.transport.frame.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "geotrain" / "transport" / "frame.py")


def test_every_dependency_is_pinned_within_its_range(pyproject):
    pins = {}
    for line in (ROOT / "deploy" / "constraints.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact, f"{line} is not pinned"
            assert "+" not in version, f"{line} is one machine's build"
            pins[name.lower().replace("_", "-")] = version
    project = pyproject["project"]
    for text in (*project["dependencies"], *project["optional-dependencies"]["test"]):
        requirement = Requirement(text)
        pin = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(pin), f"{text} excludes the pin {pin}"
    assert "geotrain" not in pins


def test_users_get_wide_ranges(pyproject):
    for text in pyproject["project"]["dependencies"]:
        operators = {specifier.operator for specifier in Requirement(text).specifier}
        assert operators <= {">=", "<"}, text


def test_version_and_license_are_what_the_project_says(pyproject):
    assert geotrain.__version__ == pyproject["project"]["version"]
    assert metadata("geotrain")["License-Expression"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_entry_points_of_the_repository():
    assert (ROOT / ".ci" / "run").stat().st_mode & stat.S_IXUSR
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "check", "bench", "table", "soak", "faults", "fuzz"):
        assert f"\n{target}: $(STAMP)\n" in makefile
