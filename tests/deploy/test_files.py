"""All of deploy/: it parses, what it names is there, and the README tells of it."""

import re

import pytest
from command_lines import (
    example_lines,
    geotrain_lines,
    parse,
    parse_example,
    tails,
)
from deployed import DEPLOY, IMAGE_FOLDERS, IMAGE_HOME, ROOT, documents, files, load

from geotrain import cli

STRUCTURED = [path for path in files() if path.suffix in (".yaml", ".yml", ".toml", ".json")]
IMAGE_PATH = re.compile(r"(?<![\w./-])/(?:opt/geotrain|run/geotrain|checkpoints)[\w./-]*")
REPOSITORY_PATH = re.compile(r"(?<![\w./-])deploy/[\w./-]*\w")


def name_of(path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", STRUCTURED, ids=name_of)
def test_every_structured_file_parses(path):
    assert all(document for document in load(path))


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_files_stay_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 350


@pytest.mark.parametrize("path", sorted({*files(), *documents()}), ids=name_of)
def test_every_path_of_the_repository_that_is_named_exists(path):
    text = path.read_text(encoding="utf-8")
    missing = {name for name in REPOSITORY_PATH.findall(text) if not (ROOT / name).exists()}
    assert not missing


@pytest.mark.parametrize("path", files(), ids=name_of)
def test_every_path_of_the_image_that_is_named_is_made_by_the_dockerfile(path):
    for name in IMAGE_PATH.findall(path.read_text(encoding="utf-8")):
        name = name.rstrip("./")
        if name.startswith(f"{IMAGE_HOME}/examples"):
            assert (DEPLOY / "examples" / name.removeprefix(f"{IMAGE_HOME}/examples/")).exists()
        elif name.startswith(IMAGE_HOME):
            inside = name.removeprefix(IMAGE_HOME).lstrip("/")
            assert inside in ("", "venv", "venv/bin", "venv/bin/geotrain", "venv/bin/pip"), name
        else:
            assert name.startswith(IMAGE_FOLDERS), name


def test_the_readme_tells_of_every_file():
    text = (DEPLOY / "README.md").read_text(encoding="utf-8")
    for path in files():
        inside = path.relative_to(DEPLOY)
        named = str(inside) in text or f"{inside.parent}/" in text
        assert named or path.name == "README.md", inside


@pytest.mark.parametrize(("file", "argv"), geotrain_lines())
def test_every_geotrain_command_line_parses(file, argv, capsys):
    parse(lambda: cli.main(argv))


def test_command_lines_are_found_where_they_are():
    found = {file for file, _ in geotrain_lines()}
    assert found >= {
        *("README.md", "deploy/README.md", "deploy/Dockerfile", "deploy/compose.yaml"),
        *("deploy/sites/virginia.toml", "deploy/sites/frankfurt.toml"),
        *("deploy/systemd/geotrain-daemon.service", "deploy/slurm/geotrain.sbatch"),
        *("deploy/kubernetes/job.yaml", "deploy/examples/plain_model.py"),
        *("deploy/examples/nanogpt.py", "deploy/examples/early_stop.py"),
    }


def test_a_wrong_command_line_would_be_refused(capsys):
    with pytest.raises(AssertionError, match="refused"):
        parse(lambda: cli.main(["check", "--configuration", "site.toml"]))


@pytest.mark.parametrize(("file", "example", "argv"), example_lines())
def test_every_command_line_of_an_example_parses(file, example, argv):
    parse_example(example, argv)


def test_every_torchrun_line_parses():
    from torch.distributed.run import get_args_parser

    lines = []
    for path in sorted({*files(), *documents()}):
        lines += tails(path, lambda argv: argv[0] == "torchrun" and len(argv) > 1)
    assert len(lines) >= 4
    for argv in lines:
        options = get_args_parser().parse_args(argv[1:])
        assert options.nproc_per_node == "1", "one rank in each region"
        assert options.training_script.endswith(".py")


@pytest.mark.parametrize("example", sorted((DEPLOY / "examples").glob("*.py")), ids=name_of)
def test_every_example_says_what_it_shows_and_how_to_run_it(example):
    docstring = example.read_text(encoding="utf-8").split('"""')[1]
    assert f"python deploy/examples/{example.name}" in docstring
    assert "geotrain run --config" in docstring
