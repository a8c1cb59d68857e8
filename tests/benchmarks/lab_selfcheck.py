"""The lab against what it was asked for, as JSON: round trip, rate, loss, cost, and what it leaves.

    python tests/benchmarks/lab_selfcheck.py                 everything, some ten minutes
    python tests/benchmarks/lab_selfcheck.py links relay     only these parts

Parts: links (round trip and rate over the grid, in namespaces), relay (the same over relays), loss
(0.1 % as seen by datagrams and by TCP segments), cpu (of the forwarding processes at 1 Gbit/s),
kills (50 starts and kills at random moments). Wants a quiet machine; says how busy it was.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from geotrain.lab.selfcheck import ask, self_check, serving  # noqa: E402
from geotrain.lab.settings import LinkSettings  # noqa: E402
from geotrain.lab.wan import Kind, Wan, open_wan  # noqa: E402
from tests.lab.emulator.remains import MARK, left_behind, look  # noqa: E402

SITES = ("a", "b")
RTTS_MS, RATES_MBIT = (0, 20, 100, 300), (50, 500, 1000)
MBIT = 1e6 / 8
NUM_KILLS = 50
Row = dict[str, Any]


def lab(kind: Kind, *, congestion: str | None = None, **settings: Any) -> Wan:
    return open_wan(kind, sites=SITES, link=LinkSettings(**settings), congestion=congestion)


def links(kind: Kind) -> list[Row]:
    """Round trip and rate of both directions, over the grid."""
    rows = []
    for rtt_ms in RTTS_MS:
        for mbit in RATES_MBIT:
            settings = {"delay_s": rtt_ms / 2e3, "rate_bytes_per_s": mbit * MBIT}
            with lab(kind, **settings) as wan:
                for checked in self_check(wan):
                    row = {
                        "rtt_asked_ms": rtt_ms,
                        "rtt_ms": round(checked.rtt_s * 1e3, 2),
                        "rtt_p99_ms": round(checked.rtt_p99_s * 1e3, 2),
                        "mbit_asked": mbit,
                        "mbit": round(checked.rate / MBIT, 1),
                        "holds": checked.holds,
                        "congestion": wan.congestion,
                    }
                    rows.append(row)
                    _note(row)
    return rows


def loss() -> list[Row]:
    """0.1 %: of 10,000 datagrams, and of the segments of a bulk flow, most of them offloaded."""
    rows = []
    for congestion in ("bbr", "cubic"):
        settings = {"delay_s": 0.01, "rate_bytes_per_s": 200 * MBIT, "loss": 0.001}
        with lab("netns", congestion=congestion, **settings) as wan:
            with serving(wan, SITES) as address:
                datagrams = ask(wan, "a", ["loss", *address, "10000", "2000"])
                before = wan.status()["links"][0]["counters"]
                ask(wan, "a", ["rate", *address, "6", "4", "2", "0"])
                after = wan.status()["links"][0]["counters"]
        names = ("num_packets", "num_segments", "num_lost", "num_dropped")
        bulk = {name: after[name] - before[name] for name in names}
        row = {
            "congestion": congestion,
            "asked": 0.001,
            "datagrams": datagrams,
            "bulk": bulk | {"loss": bulk["num_lost"] / bulk["num_segments"]},
        }
        rows.append(row)
        _note(row)
    return rows


def cpu() -> list[Row]:
    """Share of a core that each forwarding process takes at 1 Gbit/s, one way and both."""
    rows = []
    for ways in (1, 2):
        for congestion in ("cubic", "bbr"):
            settings = {"delay_s": 0.05, "rate_bytes_per_s": 1000 * MBIT}
            with lab("netns", congestion=congestion, **settings) as wan:
                rows.append(_cost(wan, ways) | {"congestion": congestion, "ways": ways})
                _note(rows[-1])
    return rows


def _cost(wan: Wan, ways: int) -> Row:
    directions = [SITES, SITES[::-1]][:ways]
    # Both servers are up before either flow starts, so that the flows run side by side.
    with serving(wan, SITES) as there, serving(wan, SITES[::-1]) as back:
        clients = []
        for way, address in zip(directions, (there, back), strict=False):
            arguments = ["rate", *address, "12", "4", "6", str(1000 * MBIT * 1.04)]
            clients.append(_client(wan, way[0], arguments))
        time.sleep(6)
        before, started = _cpu_s(wan), time.monotonic()
        time.sleep(5)
        used, wall_s = _cpu_s(wan), time.monotonic() - started
        rates = [json.loads(client.communicate()[0])["bytes_per_s"] / MBIT for client in clients]
    shares = [round((new - old) / wall_s, 3) for new, old in zip(used, before, strict=True)]
    return {"mbit": [round(rate, 1) for rate in rates], "cores": shares, "load": _load()}


def _client(wan: Wan, site: str, arguments: list[str]) -> "subprocess.Popen[str]":
    command = [sys.executable, str(ROOT / "geotrain/lab/probe.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return wan.popen(site, command, stdout=subprocess.PIPE, text=True, env=environment)


def _cpu_s(wan: Wan) -> list[float]:
    return [link["counters"]["cpu_s"] for link in wan.status()["links"]]


def kills() -> Row:
    """Owners of labs killed at random moments, from before the lab is up to some time after."""
    owner = ROOT / "tests" / "lab" / "owner.py"
    rng = random.Random(11)
    mark = f"kills-{os.getpid()}"
    before = look(mark)
    remains: list[str] = []
    num_up = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_KILLS):
            kind = "relay" if number % 5 == 4 else "netns"
            with subprocess.Popen(
                [sys.executable, str(owner), kind],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "TMPDIR": folder, MARK: mark},
                text=True,
            ) as process:
                assert process.stdout is not None
                time.sleep(rng.uniform(0.0, 1.0))
                victim = _victim(process, rng) if number % 2 else process.pid
                os.kill(victim, 9)
                process.kill()
                num_up += bool(process.stdout.read())
            found = left_behind(before, folder=Path(folder), limit_s=5.0)
            remains += [f"kill {number}: {item}" for item in found]
    row = {"kills": NUM_KILLS, "were_up": num_up, "left_behind": remains}
    _note(row)
    return row


def _victim(process: "subprocess.Popen[str]", rng: random.Random) -> int:
    """The owner or, where there are some, any of the lab's processes, a moment before the owner."""
    import psutil

    family = [process.pid, *(c.pid for c in psutil.Process(process.pid).children(recursive=True))]
    return rng.choice(family)


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def _note(row: Row) -> None:
    print(row, file=sys.stderr, flush=True)


def main() -> None:
    parts = {
        "links": lambda: links("netns"),
        "relay": lambda: links("relay"),
        "loss": loss,
        "cpu": cpu,
        "kills": kills,
    }
    result: Row = {"load_before": _load(), "cores": os.cpu_count(), "kernel": os.uname().release}
    for name in sys.argv[1:] or parts:
        result[name] = parts[name]()
    print(json.dumps(result | {"load_after": _load()}, indent=1))


if __name__ == "__main__":
    main()
