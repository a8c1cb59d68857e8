"""`plan.window = "auto"` against the best of 12 fixed windows, on 10 links.

    python tests/benchmarks/auto_windows.py                about 14 minutes
    python tests/benchmarks/auto_windows.py --links 0,4    two of them, about 3

Two stages of 10 and 20 ms, 16 microbatches of 256 KiB. The fixed windows of a link are steps of one
run that repeats a file of plans; each has two turns, so that a busy moment does not decide.
Needs a quiet machine; root and Linux for network namespaces, else it is over relays.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from geotrain.control.journal import Entry  # noqa: E402
from tests.benchmarks.step_table import Result, run  # noqa: E402

LINKS = (
    *((0, 1000), (0, 5000), (20, 200), (50, 1000), (100, 50)),
    *((100, 500), (100, 5000), (200, 100), (300, 1000), (400, 200)),
)
"""Round trip in ms, rate in Mbit/s."""
NUM_MICROBATCHES = 16
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
STEPS_A_TURN = 4
"""The first of each still has the last setting's tensors under way, and is not counted."""
AUTO_STEPS = 14
SETTLED_FROM = 6
"""Of the steps under auto; what it took to find the windows is told elsewhere."""
WORK = ("--forward-ms", "10", "--backward-ms", "20", "--boundary-kib", "256")


def plans(widths: Sequence[int], *, turns: int, steps: int) -> list[Entry]:
    """Every width in turn; from step 2 on, for the first step of a run is like no other."""
    order = [width for _ in range(turns) for width in widths]
    entries = [Entry(step=1, num_microbatches=NUM_MICROBATCHES, windows=(NUM_MICROBATCHES, 1))]
    for number, width in enumerate(order):
        windows = (width, 1)
        step = 2 + number * steps
        entries.append(Entry(step=step, num_microbatches=NUM_MICROBATCHES, windows=windows))
    return entries


def by_width(result: Result, *, steps: int) -> dict[int, float]:
    """The median step of each width."""
    found = defaultdict(list)
    both = zip(result["all_windows"][1:], result["all_step_s"][1:], strict=True)
    for number, (windows, step_s) in enumerate(both):
        if number % steps > 0:
            found[windows[0]].append(step_s)
    return {width: statistics.median(times) for width, times in found.items()}


def bench(rtt_ms: float, mbit: float, *options: str) -> Result:
    command = [sys.executable, "-m", "geotrain", "bench", "step", "--json", *WORK]
    command += ["--microbatches", str(NUM_MICROBATCHES)]
    return run([*command, "--rtt-ms", f"{rtt_ms:g}", "--mbit", f"{mbit:g}", *options])


def compare(rtt_ms: float, mbit: float, *, turns: int) -> str:
    """One row of markdown."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plans.jsonl"
        entries = plans(WIDTHS, turns=turns, steps=STEPS_A_TURN)
        file.write_text("".join(entry.to_line() for entry in entries), encoding="utf-8")
        steps = 1 + len(WIDTHS) * turns * STEPS_A_TURN
        fixed = bench(rtt_ms, mbit, "--replay", str(file), "--steps", str(steps))
    auto = bench(rtt_ms, mbit, "--window", "auto", "--steps", str(AUTO_STEPS))
    for result in (fixed, auto):
        if "failed" in result:
            return f"| {rtt_ms:g} ms, {mbit:g} Mbit/s | {result['failed']} |"
    times = by_width(fixed, steps=STEPS_A_TURN)
    best = min(times, key=times.__getitem__)
    auto_s = statistics.median(auto["all_step_s"][SETTLED_FROM:])
    cells = [
        f"{rtt_ms:g} ms, {mbit:g} Mbit/s",
        f"{auto['ideal_s']:.3f}",
        f"{times[2]:.3f}",
        f"{times[best]:.3f} ({best})",
        f"{auto_s:.3f} ({auto['windows'][0]})",
        f"{auto_s / times[best]:.3f}",
        f"{auto['load']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = ",".join(str(number) for number in range(len(LINKS)))
    parser.add_argument("--links", default=every, help=f"which of the {len(LINKS)} (default all)")
    parser.add_argument("--turns", type=int, default=2, help="of each fixed window (default 2)")
    parser.add_argument("--results", type=Path, help="append each row to this file as well")
    given = parser.parse_args()
    columns = ("link", "ideal", "window 2", "best fixed (window)", "auto (window)", "auto / best")
    print(f"| {' | '.join((*columns, 'load'))} |\n|{'---|' * 7}", flush=True)
    for number in given.links.split(","):
        row = compare(*LINKS[int(number)], turns=given.turns)
        print(row, flush=True)
        if given.results is not None:
            with given.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"link": LINKS[int(number)], "row": row}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
