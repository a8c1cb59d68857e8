"""Finds the command lines in the files and documents, and parses them with the real parsers."""

import argparse
import importlib.util
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from deployed import DEPLOY, IMAGE_HOME, ROOT, documents, files, pod_containers

from geotrain import cli

_OPERATORS = {"&&", "||", "|", ";", "&", ">", ">>", "<"}
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_-]*")
_JSON_LIST = re.compile(r'\[\s*"[^\]]*"\s*\]')


class _Parsed(BaseException):
    """Raised in place of running what was parsed."""


def shell_lines(path: Path) -> Iterator[str]:
    """What could be commands: of a document its code, of another file each line and comment."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    if path.suffix == ".md":
        # What is fenced as text is output, and has no commands.
        text = re.sub(r"^ *```text\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
        outside = re.sub(r"^ *```\w*\n.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        yield from (line for block in blocks for line in block.splitlines())
        yield from re.findall(r"`([^`]+)`", outside)
    elif path.suffix != ".json":
        yield from (line.strip().lstrip("#").strip() for line in text.splitlines())


def commands(path: Path) -> Iterator[list[str]]:
    """Each command line of a file, up to the next shell operator."""
    for line in shell_lines(path):
        lists = _JSON_LIST.findall(line)
        if lists:
            yield from (json.loads(text) for text in lists)
            continue
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError:  # an apostrophe: prose
            continue
        while tokens:
            end = next((i for i, token in enumerate(tokens) if token in _OPERATORS), len(tokens))
            if tokens[:end]:
                yield [token.rstrip(";") for token in tokens[:end]]
            tokens = tokens[end + 1 :]


def tails(path: Path, is_start: Callable[[Sequence[str]], bool]) -> list[list[str]]:
    """Of each command the part from the first token on that `is_start` knows."""
    found = []
    for argv in commands(path):
        starts = (index for index in range(len(argv)) if is_start(argv[index:]))
        index = next(starts, None)
        # "up|set", "FILE..." and "[--json]" stand for several lines, not for one.
        if index is not None and not any(mark in " ".join(argv) for mark in ("|", "...", "[")):
            # A document's "--regions N": the flag is checked, with a value that is one.
            found.append(
                ["2" if _PLACEHOLDER.fullmatch(token) else token for token in argv[index:]]
            )
    return found


def is_geotrain(argv: Sequence[str]) -> bool:
    """`geotrain COMMAND`, wherever it is installed; not the name of an image or a folder."""
    return len(argv) > 1 and Path(argv[0]).name == "geotrain" and argv[1] in subcommands()


def subcommands() -> set[str]:
    (choices,) = (
        set(action.choices)
        for action in cli._parser([])._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return choices


def geotrain_lines() -> list[tuple[str, list[str]]]:
    """(file, argv after `geotrain`) of all files and documents."""
    found = []
    for path in sorted({*files(), *documents()}):
        name = str(path.relative_to(ROOT))
        found += [(name, argv[1:]) for argv in tails(path, is_geotrain)]
        demo_args = re.findall(r'DEMO_ARGS="([^"]*)"', path.read_text(encoding="utf-8"))
        found += [(name, ["demo", *shlex.split(options)]) for options in demo_args]
    return found


def example_of(argument: str) -> Path | None:
    """The example that an argument names, in the repository or in the image."""
    for prefix in ("deploy/examples/", f"{IMAGE_HOME}/examples/"):
        if argument.startswith(prefix):
            return DEPLOY / "examples" / argument.removeprefix(prefix)
    return None


def example_lines() -> list[tuple[str, Path, list[str]]]:
    """(file, example, its arguments) of every command that runs an example."""
    found = []
    for path in sorted({*files(), *documents()}):
        lines = tails(path, is_python)
        if path.name == "job.yaml":  # there it is a list with an entry a line
            lines.append(pod_containers()["trainer"]["command"])
        for argv in lines:
            examples = [example_of(token) for token in argv]
            at = next((i for i, example in enumerate(examples) if example is not None), None)
            if at is not None:
                found.append((str(path.relative_to(ROOT)), examples[at], argv[at + 1 :]))
    return found


def is_python(argv: Sequence[str]) -> bool:
    return argv[0] in ("python", "torchrun")


def parse(main: Callable[[], object]) -> None:
    """Call `main` up to its first `parse_args`. AssertionError where that refuses."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        original(self, args, namespace)
        raise _Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        try:
            main()
        except _Parsed:
            return
        except SystemExit as exit:
            assert exit.code == 0, "argparse refused"  # 0 is --help
            return
    raise AssertionError("nothing was parsed")


def parse_example(path: Path, argv: Sequence[str]) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        patch.setattr(sys, "argv", [str(path), *argv])
        spec.loader.exec_module(module)
        parse(module.main)
