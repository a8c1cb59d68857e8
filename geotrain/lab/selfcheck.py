"""Does the lab do what was asked of it? Round trip and rate of every link, asked and measured."""

import contextlib
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from geotrain.lab.emulator.sites import LabFailedError
from geotrain.lab.processes import isolated_module
from geotrain.lab.settings import MSS_BYTES, Direction, LinkSettings
from geotrain.lab.wan import Wan

RTT_TOLERANCE_S = {"netns": 0.002, "relay": 0.005}
RATE_TOLERANCE = {"netns": 0.03, "relay": 0.05}
_NUM_PINGS = 20
_NUM_FLOWS = 4
_MEASURED_S = 2.0
_LIMIT_S = 90.0
_SENT_OVER_ASKED = 1.035
_INITIAL_WINDOW_BYTES = 10 * MSS_BYTES
_TRIES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One direction of one link: what was asked and what was measured."""

    direction: Direction
    kind: str
    rtt_asked_s: float
    rtt_s: float
    """Median; the least and the 99th percentile are beside it."""
    rtt_min_s: float
    rtt_p99_s: float
    rate_asked: float | None
    """Bytes of payload a second; None: not limited, so there is nothing to compare with."""
    rate: float

    @property
    def rtt_holds(self) -> bool:
        return abs(self.rtt_s - self.rtt_asked_s) <= RTT_TOLERANCE_S[self.kind]

    @property
    def rate_holds(self) -> bool:
        if self.rate_asked is None:
            return True
        return abs(self.rate / self.rate_asked - 1) <= RATE_TOLERANCE[self.kind]

    @property
    def holds(self) -> bool:
        return self.rtt_holds and self.rate_holds

    def __str__(self) -> str:
        asked = "any rate" if self.rate_asked is None else f"{self.rate_asked * 8e-6:g} Mbit/s"
        verdict = "as asked" if self.holds else "NOT as asked"
        return (
            f"{' to '.join(self.direction)}: asked {self.rtt_asked_s * 1e3:g} ms and {asked}, "
            f"measured {self.rtt_s * 1e3:.2f} ms and {self.rate * 8e-6:.1f} Mbit/s: {verdict}"
        )


def self_check(wan: Wan) -> list[Checked]:
    """Measure every direction, one after another, with plain sockets inside the sites.

    Takes some seconds each, since TCP has to come up to speed; one that does not hold is measured
    once more, since what TCP does after an unlucky start is not the link's fault. Losses, jitter
    and other traffic on the links count against what is asked.
    """
    settings = {
        (link["source"], link["target"]): LinkSettings(**link["settings"])
        for link in wan.status()["links"]
    }
    found = []
    for way in settings:
        for _ in range(_TRIES):
            checked = _check(wan, way, settings[way], settings[way[::-1]])
            if checked.holds:
                break
        found.append(checked)
    return found


def _check(wan: Wan, way: Direction, forward: LinkSettings, back: LinkSettings) -> Checked:
    rtt_s = forward.delay_s + back.delay_s
    with serving(wan, way) as address:
        rtt = ask(wan, way[0], ["rtt", *address, str(_NUM_PINGS)])
        duration_s = _MEASURED_S + 1.0 + _num_rounds(rtt_s, forward) * rtt_s
        most = (forward.rate_bytes_per_s or 0.0) * _SENT_OVER_ASKED
        numbers = [str(duration_s), str(_NUM_FLOWS), str(_MEASURED_S), str(most)]
        rate = ask(wan, way[0], ["rate", *address, *numbers])
    return Checked(
        direction=way,
        kind=wan.kind,
        rtt_asked_s=rtt_s,
        rtt_s=rtt["median_s"],
        rtt_min_s=rtt["min_s"],
        rtt_p99_s=rtt["p99_s"],
        rate_asked=forward.rate_bytes_per_s,
        rate=rate["bytes_per_s"],
    )


def _num_rounds(rtt_s: float, link: LinkSettings) -> float:
    """Round trips until the flows have settled: their windows double, then find their places.

    Not many more: what they send over the rate fills the queue, and then there are losses.
    """
    bdp_bytes = rtt_s * (link.rate_bytes_per_s or 0.0)
    return 8 + math.log2(max(1.0, bdp_bytes / (_NUM_FLOWS * _INITIAL_WINDOW_BYTES)))


@contextlib.contextmanager
def serving(wan: Wan, way: Direction) -> Iterator[list[str]]:
    """The probe's server in the target; yields host and port as the source has to dial them."""
    source, target = way
    command = isolated_module("geotrain.lab.probe", ["serve", wan.listen_host(target)])
    with wan.popen(target, command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            text = server.stdout.readline()
            if not text:
                raise LabFailedError(f"the probe did not start in {target}")
            route = wan.route(source, target, int(text))
            try:
                yield [route.host, str(route.port)]
            finally:
                wan.close_route(route)
        finally:
            server.kill()


def ask(wan: Wan, site: str, arguments: Sequence[str]) -> dict[str, float]:
    """Run one measurement of the probe in the site. LabFailedError with its last words."""
    command = wan.command(site, isolated_module("geotrain.lab.probe", arguments))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise LabFailedError(f"measuring from {site} took over {_LIMIT_S:g} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise LabFailedError(f"measuring from {site} failed: {last}") from error
    result: dict[str, float] = json.loads(done.stdout)
    return result
