"""Does the lab do what was asked of it? Round trip and rate of every link, asked and measured."""

import contextlib
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
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
_SLACK_S = 20.0
"""For a direction, beyond twice what its measurements should take: a busy machine, lost SYNs."""
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
    rate_judged: bool = True
    """False where TCP cannot reach the rate asked for, whatever the link does."""

    @property
    def rtt_holds(self) -> bool:
        return abs(self.rtt_s - self.rtt_asked_s) <= RTT_TOLERANCE_S[self.kind]

    @property
    def rate_holds(self) -> bool:
        if self.rate_asked is None or not self.rate_judged:
            return True
        return abs(self.rate / self.rate_asked - 1) <= RATE_TOLERANCE[self.kind]

    @property
    def holds(self) -> bool:
        return self.rtt_holds and self.rate_holds

    def __str__(self) -> str:
        asked = "any rate" if self.rate_asked is None else f"{self.rate_asked * 8e-6:g} Mbit/s"
        verdict = "as asked" if self.holds else "NOT as asked"
        if not self.rate_judged:
            verdict = f"round trip {verdict}, rate not judged: TCP under loss"
        return (
            f"{' to '.join(self.direction)}: "
            f"asked round trip {self.rtt_asked_s * 1e3:g} ms and {asked}, "
            f"measured {self.rtt_s * 1e3:.2f} ms and {self.rate * 8e-6:.1f} Mbit/s: {verdict}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasured:
    """One direction of one link that nothing can be said about."""

    direction: Direction
    why: str

    @property
    def holds(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"{self.why}: not measured"


class MeasuringTimeoutError(LabFailedError):
    """A measurement had no result in time."""


def self_check(
    wan: Wan, *, say: Callable[[str], None] = lambda line: None
) -> list[Checked | NotMeasured]:
    """Measure every direction, one after another, with plain sockets inside the sites.

    Each has a deadline; `say` is told of it as it begins. What is cut is not measured.

    Takes some seconds each, since TCP has to come up to speed; one that does not hold is measured
    once more, since what TCP does after an unlucky start is not the link's fault. Losses, jitter
    and other traffic on the links count against what is asked; a rate under losses is not judged
    unless TCP is BBR, since others slow down at each loss.
    """
    settings = {
        (link["source"], link["target"]): LinkSettings(**link["settings"])
        for link in wan.status()["links"]
    }
    found: list[Checked | NotMeasured] = []
    for way in settings:
        name = " to ".join(way)
        forward, back = settings[way], settings[way[::-1]]
        why = why_not_measured(way, forward, back)
        if why is not None:
            found.append(NotMeasured(direction=way, why=why))
            continue
        limit_s = _limit_s(forward, back)
        for attempt in range(_TRIES):
            again = "measuring once more" if attempt else "measuring"
            say(f"{name}: {again}, {limit_s:.0f} s at most")
            checked = _check(wan, way, forward, back, limit_s)
            if checked.holds or isinstance(checked, NotMeasured):
                break
        found.append(checked)
    return found


def why_not_measured(way: Direction, forward: LinkSettings, back: LinkSettings) -> str | None:
    """TCP needs the way back as well; None where both are open."""
    if forward.cut:
        return f"{' to '.join(way)} is cut"
    if back.cut:
        return f"{' to '.join(way)}: the way back is cut"
    return None


def is_rate_judged(forward: LinkSettings, back: LinkSettings, congestion: str | None) -> bool:
    """
    Args:
        congestion: Of the sites; None where they are relays, which hold the flow at each loss.
    """
    return congestion == "bbr" or not (forward.loss or back.loss)


def _limit_s(forward: LinkSettings, back: LinkSettings) -> float:
    rtt_s = forward.delay_s + back.delay_s
    return _SLACK_S + 2 * (_duration_s(rtt_s, forward) + 2 * _NUM_PINGS * rtt_s)


def _duration_s(rtt_s: float, link: LinkSettings) -> float:
    return _MEASURED_S + 1.0 + _num_rounds(rtt_s, link) * rtt_s


def _check(
    wan: Wan, way: Direction, forward: LinkSettings, back: LinkSettings, limit_s: float
) -> Checked | NotMeasured:
    rtt_s = forward.delay_s + back.delay_s
    deadline = time.monotonic() + limit_s
    most = (forward.rate_bytes_per_s or 0.0) * _SENT_OVER_ASKED
    numbers = [str(_duration_s(rtt_s, forward)), str(_NUM_FLOWS), str(_MEASURED_S), str(most)]
    try:
        with serving(wan, way) as address:

            def measure(what: str, *arguments: str) -> dict[str, float]:
                left_s = max(0.0, deadline - time.monotonic())
                return ask(wan, way[0], [what, *address, *arguments], limit_s=left_s)

            rtt = measure("rtt", str(_NUM_PINGS))
            rate = measure("rate", *numbers)
    except MeasuringTimeoutError:
        why = f"{' to '.join(way)}: no result within {limit_s:.0f} s"
        return NotMeasured(direction=way, why=why)
    return Checked(
        direction=way,
        kind=wan.kind,
        rtt_asked_s=rtt_s,
        rtt_s=rtt["median_s"],
        rtt_min_s=rtt["min_s"],
        rtt_p99_s=rtt["p99_s"],
        rate_asked=forward.rate_bytes_per_s,
        rate=rate["bytes_per_s"],
        rate_judged=is_rate_judged(forward, back, wan.congestion),
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


def ask(
    wan: Wan, site: str, arguments: Sequence[str], *, limit_s: float = _LIMIT_S
) -> dict[str, float]:
    """Run one measurement of the probe in the site.

    Raises:
        MeasuringTimeoutError: There was no result within `limit_s`.
        LabFailedError: It failed; with its last words.
    """
    command = wan.command(site, isolated_module("geotrain.lab.probe", arguments))
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise MeasuringTimeoutError(f"measuring from {site} took over {limit_s:.0f} s") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no word"])[-1]
        raise LabFailedError(f"measuring from {site} failed: {last}") from error
    result: dict[str, float] = json.loads(done.stdout)
    return result
