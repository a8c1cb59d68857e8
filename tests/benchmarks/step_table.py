"""The table of `geotrain bench step --against torch`, as the rows of markdown that its README has.

    make table                                                    every row, about an hour
    python tests/benchmarks/step_table.py --rtt-ms 100 --loss 0   two rows, 5 to 8 minutes

Each row is two runs on one emulated link of 1 Gbit/s: geotrain with windows that hide the link's
delay, against torch's 1F1B, GPipe and CSV schedules; and geotrain with 1F1B's own windows. Sites'
kernels and geotrain's connections have the congestion control that the row names. Every way of
running has a deadline: what hangs is told as "none", and the rest goes on. Most of the time goes to
the row of cubic with loss, where most ways run into theirs. Needs root, Linux and a quiet machine.
"""

import argparse
import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from geotrain.lab.bench.options import BenchOptions  # noqa: E402
from geotrain.lab.bench.schedule import NUM_WIDTHS  # noqa: E402
from geotrain.lab.emulator.netns import obstacle  # noqa: E402

COLUMNS = (
    *("round trip", "congestion control", "ideal", "lower bound", "geotrain", "/ ideal"),
    *("geotrain, classic", "1F1B", "GPipe", "CSV, best of six (warm-up)", "speedup"),
    *("over stock", "load"),
)
LOSS_RTT_MS = 100.0
LOSS_LIMIT_S = 200.0
"""With loss under cubic a step took 59 to 77 s: enough for two, where the usual limit is not."""
START_S = 180.0
"""More than a run allows its processes for starting, on top of its limit."""
STOP_S = 30.0
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One row's link."""

    rtt_ms: float
    congestion: str
    loss: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.rtt_ms:g} ms" + (f", {self.loss:.1%} loss" if self.loss else "")

    @property
    def limit_s(self) -> float | None:
        return LOSS_LIMIT_S if self.loss else None


def cells(rtts_ms: Sequence[float], congestions: Sequence[str], loss: float) -> list[Cell]:
    links = [(rtt_ms, 0.0) for rtt_ms in rtts_ms]
    links += [(LOSS_RTT_MS, loss)] if loss else []
    return [Cell(rtt_ms=r, congestion=c, loss=each) for r, each in links for c in congestions]


def command(cell: Cell, *, window: str, steps: int, against_torch: bool) -> list[str]:
    """One run of `geotrain bench step`."""
    found = [sys.executable, "-m", "geotrain", "bench", "step", "--json", "--emulator", "netns"]
    found += ["--rtt-ms", f"{cell.rtt_ms:g}", "--loss", f"{cell.loss:g}"]
    found += ["--congestion", cell.congestion, "--window", window, "--steps", str(steps)]
    found += ["--against", "torch"] if against_torch else []
    return found + (["--limit-s", f"{cell.limit_s:g}"] if cell.limit_s is not None else [])


def deadline_s(options: BenchOptions) -> float:
    """Beyond what a run with these options allows itself: then it hangs as a whole."""
    ways = 1 + (2 + NUM_WIDTHS if options.against_torch else 0)
    return ways * (START_S + options.variant_limit_s)


def run(arguments: Sequence[str]) -> Result:
    """The JSON of one run, or {"failed": why}; no longer than its deadline, and nothing is left."""
    from geotrain.commands.bench import parse

    limit_s = deadline_s(parse(arguments[arguments.index("step") :]))
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"failed": f"nothing within {limit_s:g} s"}
    finally:
        _stop(process)
    if process.returncode != 0:
        return {"failed": " ".join(err.split()) or f"exit status {process.returncode}"}
    result: Result = json.loads(out)
    return result


def _stop(process: subprocess.Popen[str]) -> None:
    """It cleans up on SIGTERM; its lab does, where that takes too long."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.communicate(timeout=STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def row(cell: Cell, hiding: Result, classic: Result) -> str:
    """One row of markdown out of the JSON of the two runs."""
    peers = hiding.get("peer_step_s", {})
    widths = hiding.get("torch_csv_widths", {})
    finished = {width: step_s for width, step_s in widths.items() if step_s is not None}
    best = min(finished, key=finished.__getitem__, default=None)
    values = [
        cell.title,
        _congestion(cell, hiding),
        _number(hiding.get("ideal_s")),
        _number(hiding.get("lower_bound_s")),
        f"**{_number(hiding.get('step_s'))}**",
        _number(hiding.get("ratio")),
        _number(classic.get("step_s")),
        _number(peers.get("torch_1f1b")),
        _number(peers.get("torch_gpipe")),
        _number(peers.get("torch_csv")) + (f" ({best})" if best is not None else ""),
        _number(hiding.get("speedup")),
        _number(hiding.get("speedup_stock")),
        _number(hiding.get("load"), digits=1),
    ]
    return f"| {' | '.join(values)} |"


def notes(cell: Cell, hiding: Result, classic: Result) -> list[str]:
    """What a row's figures do not say: what failed, what ended early, in a line each."""
    found = []
    for name, result in (("geotrain", hiding), ("geotrain, classic", classic)):
        if "failed" in result:
            found.append(f"{name}: {result['failed']}")
        elif result["num_steps"] < result["num_steps_asked"]:
            found.append(f"{name}: {result['num_steps']} of {result['num_steps_asked']} steps")
    found += [f"{name}: {note}" for name, note in hiding.get("peer_notes", {}).items()]
    return [f"{cell.title}, {cell.congestion}: {text}" for text in found]


def _congestion(cell: Cell, result: Result) -> str:
    """What both had; where they did not get what was asked for, that."""
    had = result.get("congestion", {"sites": cell.congestion, "geotrain": cell.congestion})
    if had["sites"] == had["geotrain"]:
        return str(had["sites"])
    return f"{had['sites']}, geotrain {had['geotrain'] or 'unknown'}"


def _number(value: float | None, *, digits: int = 2) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt-ms", default="0,100,200", help="rows without loss")
    parser.add_argument("--loss", type=float, default=0.001, help="0 leaves that row out")
    parser.add_argument("--congestion", default="cubic,bbr")
    parser.add_argument("--steps", type=int, default=4, help="of each; the first is not counted")
    parser.add_argument("--without-torch", action="store_true")
    parser.add_argument("--results", type=Path, help="append each run's JSON to this file")
    given = parser.parse_args()
    why_not = obstacle()
    if why_not is not None:
        print(f"the comparison needs network namespaces: {why_not}", file=sys.stderr)
        return 1
    rtts_ms = [float(text) for text in given.rtt_ms.split(",") if text]
    told = []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for cell in cells(rtts_ms, given.congestion.split(","), given.loss):
        results = []
        for window, torch in (("hide", not given.without_torch), ("classic", False)):
            asked = command(cell, window=window, steps=given.steps, against_torch=torch)
            results.append(run(asked))
            if given.results is not None:
                with given.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"asked": asked[2:], **results[-1]}) + "\n")
        print(row(cell, *results), flush=True)
        told += notes(cell, *results)
    print("\n".join(["", *told]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
