"""The rules of the tree, read from the sources: who may import whom, and which files stay pure."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PURE = {
    "geotrain.pipeline.schedule",
    "geotrain.pipeline.timed",
    "geotrain.pipeline.validate",
    "geotrain.pipeline.simulate",
    "geotrain.pipeline.idle",
    "geotrain.pipeline.timeline",
    "geotrain.pipeline.trace",
    "geotrain.pipeline.window",
    "geotrain.control.attribution",
    "geotrain.control.baseline",
    "geotrain.control.figures",
    "geotrain.control.joints",
    "geotrain.control.laid_out",
    "geotrain.control.split",
    "geotrain.control.timings",
    "geotrain.control.verdicts",
    "geotrain.control.watched",
    "geotrain.control.observed",
    "geotrain.control.counts",
    "geotrain.control.journal",
    "geotrain.control.costs",
    "geotrain.control.planner",
    "geotrain.control.controller",
    "geotrain.control.ideal",
    "geotrain.control.votes",
    "geotrain.control.recovery",
    "geotrain.daemon.routing",
    "geotrain.transport.frame",
    "geotrain.transport.messages",
    "geotrain.transport.flow",
    "geotrain.transport.reassembly",
    "geotrain.transport.restoring",
    "geotrain.transport.session",
    "geotrain.transport.estimator",
    "geotrain.transport.backoff",
    "geotrain.transport.events",
    "geotrain.transport.protocol",
    "geotrain.transport.pacing",
    "geotrain.transport.lane_count",
    "geotrain.transport.turns",
    "geotrain.transport.lives",
    "geotrain.transport.pings",
    "geotrain.transport.control_records",
    "geotrain.compression.policy",
    "geotrain.compression.guard",
    "geotrain.lab.settings",
    "geotrain.lab.script",
    "geotrain.lab.emulator.segments",
    "geotrain.lab.emulator.chance",
    "geotrain.lab.emulator.flows",
    "geotrain.lab.emulator.packet_line",
    "geotrain.lab.emulator.shaper",
    "geotrain.lab.history",
    "geotrain.lab.bench.progress",
    "geotrain.lab.bench.link_report",
    "geotrain.lab.bench.phases",
    "geotrain.lab.demo.changes",
    "geotrain.lab.demo.comparison",
    "geotrain.lab.demo.links",
    "geotrain.lab.demo.options",
    "geotrain.lab.demo.report",
    "geotrain.lab.demo.state",
    "geotrain.lab.demo.strips",
    "geotrain.lab.demo.tables",
    "geotrain.lab.demo.view",
    "geotrain.lab.demo.words",
}
"""As planned; those that are not written yet are skipped."""
IMPURE = {"socket", "asyncio", "time", "threading", "random", "torch", "secrets", "select"}

TORCH_FREE_ROOTS = ("geotrain.daemon", "geotrain.transport", "geotrain.compression.host_zstd")
AIOHTTP_HOMES = {"geotrain.transport.http", "geotrain.daemon.status"}

LAYERS = (
    {"cli", "commands"},
    {"pipeline.step", "region", "membership", "daemon", "lab"},
    {"pipeline"},
    {"control"},
    {
        f"pipeline.{name}"
        for name in ("schedule", "timed", "validate", "window", "simulate", "idle")
    },
    {"transport", "compression", "state"},
    {"config"},
    {"errors", "observability", "version", "whole_file"},
)
"""From the top; a module imports from its own layer or from those below."""


@cache
def modules() -> dict[str, Path]:
    """Every module of the product by its import name."""
    found = {}
    for folder, package in (
        ("geotrain", "geotrain"),
        ("transport", "geotrain.transport"),
        ("compression", "geotrain.compression"),
    ):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            # rglob follows the two symlinks on some Python versions; those are listed by themselves
            if folder == "geotrain" and parts[0] in ("transport", "compression"):
                continue
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


@cache
def imports(module: str, *, at_import_time: bool = False) -> frozenset[str]:
    """What a module imports, as full names; for `from a import b` both a and a.b."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    nodes = _outside_functions(tree) if at_import_time else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import"
            assert node.module is not None
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            yield from _outside_functions(node)


def own_imports(module: str) -> set[str]:
    """The modules of the product that a module imports, wherever in the file."""
    return {name for name in imports(module) if name in modules() and name != module}


def top_level(names: frozenset[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def impure(module: str) -> set[str]:
    """What a pure module must not have; the type of the generator that it is given is fine."""
    names = imports(module)
    if {name for name in names if name.startswith("random")} == {"random", "random.Random"}:
        names -= {"random", "random.Random"}
    return top_level(names) & IMPURE


def layer_of(module: str) -> int:
    """The index into LAYERS; the longest prefix that is named there wins."""
    name = module.removeprefix("geotrain.")
    if name.startswith(("cli", "__main__")):
        name = "cli"
    elif name.startswith("config"):
        name = "config"
    found = [
        (len(entry), index)
        for index, layer in enumerate(LAYERS)
        for entry in layer
        if name == entry or name.startswith(entry + ".")
    ]
    assert found, f"{module} has no place in the tree"
    return max(found)[1]


def test_modules_are_found_through_neither_symlink_twice():
    assert "geotrain.transport.frame" in modules()
    assert "geotrain.compression.codec" in modules()
    assert len(set(modules().values())) == len(modules())


@pytest.mark.parametrize("module", sorted(name for name in modules() if name != "geotrain"))
def test_imports_point_downwards(module):
    for imported in own_imports(module) - {"geotrain"}:
        assert layer_of(imported) >= layer_of(module), f"{module} must not import {imported}"


def test_transport_and_compression_do_not_know_each_other():
    for module in modules():
        for one, other in (("transport", "compression"), ("compression", "transport")):
            if module.startswith(f"geotrain.{one}."):
                strangers = {n for n in imports(module) if n.startswith(f"geotrain.{other}")}
                assert not strangers, f"{module} imports {strangers}"


def test_aiohttp_stays_in_its_two_files():
    users = {module for module in modules() if "aiohttp" in top_level(imports(module))}
    assert users <= AIOHTTP_HOMES


@pytest.mark.parametrize(
    "module", sorted(name for name in modules() if name.startswith(TORCH_FREE_ROOTS))
)
def test_daemon_and_transport_never_reach_torch(module):
    seen, todo = {module}, [module]
    while todo:
        current = todo.pop()
        assert "torch" not in top_level(imports(current)), f"{module} reaches torch in {current}"
        # Importing a.b.c runs a and a.b as well.
        parents = {current.rsplit(".", depth)[0] for depth in range(1, current.count(".") + 1)}
        for name in own_imports(current) | (parents & modules().keys()):
            # The package's own names are loaded on first use, which no import here is.
            if name not in seen and name != "geotrain":
                seen.add(name)
                todo.append(name)


def test_importing_the_daemon_loads_no_torch_in_fact():
    code = (
        "import sys, geotrain.cli, geotrain.config, geotrain.daemon.main\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("module", sorted(PURE & modules().keys()))
def test_pure_files_touch_no_clock_no_chance_and_no_network(module):
    assert not impure(module)
    # Nor by way of another module of ours that does, at import time.
    for name in own_imports(module):
        assert not impure(name), f"{module} imports {name}"


def test_transport_and_compression_use_neither_pickle_nor_eval():
    for module, path in modules().items():
        if module.startswith(("geotrain.transport", "geotrain.daemon", "geotrain.compression")):
            assert not top_level(imports(module)) & {"pickle", "marshal", "shelve", "dill"}
            called = {
                node.func.id
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            }
            assert not called & {"eval", "exec", "__import__"}, module


def test_broad_excepts_raise_again_or_say_why():
    """Only a thread's or task's outermost function may swallow everything, and tells it."""
    for module, path in modules().items():
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if broad and not isinstance(node.body[-1], ast.Raise):
                told = "#" in lines[node.lineno - 1] or "logger.exception" in lines[node.lineno]
                assert told, f"{module}:{node.lineno} swallows everything and gives no reason"


def _mentions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_every_module_is_reached_by_a_test():
    """By an import or by its name in a string, as a process starts it; at first or second hand."""
    todo = list((ROOT / "tests").rglob("*.py"))
    reached = set[str]()
    while todo:
        for name in _mentions(todo.pop()) & modules().keys() - reached:
            reached.add(name)
            todo.append(modules()[name])
    code = {name for name, path in modules().items() if path.read_text(encoding="utf-8").strip()}
    assert sorted(code - reached - {"geotrain.__main__"}) == []
