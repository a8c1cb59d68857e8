"""The daily limit of dollars, from the bytes of a link to what a rank hears, over a real socket."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from geotrain.configuration.site_table import LivenessConfig
from geotrain.daemon.egress import EgressMeter
from geotrain.daemon.watch import Watch
from geotrain.transport.attachment import Attachment
from tests.transport.local_line import TIMEOUT_S, LocalLine, local_line

GB = 10**9
REASON = "egress of 2 USD today reached limits.egress_usd_per_day = 2"


class CountedLink:
    def __init__(self) -> None:
        self.bytes_sent = 0

    def stats(self) -> dict[str, Any]:
        return {"state": "connected", "bytes_sent": self.bytes_sent, "reason": ""}


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LocalLine]:
    with local_line(tmp_path, 2) as line:
        yield line


def watch(line: LocalLine, link: CountedLink) -> Watch:
    return Watch(
        exchange=line.exchanges[0],
        attachments=line.attachments[0],
        links={"b": link},
        egress=EgressMeter({"b": 1.0}, 2.0),
        liveness=LivenessConfig(),
        now=0.0,
    )


def hears(rank: Attachment, reason: str | None) -> bool:
    return rank.wait(lambda: rank.stop_reason == reason, timeout_s=TIMEOUT_S)


def test_midnight_lifts_the_limit_for_a_rank_that_is_attached(line: LocalLine) -> None:
    link = CountedLink()
    watched = watch(line, link)

    def tick(now: float, day: str) -> None:
        line.call(lambda: watched.tick(now=now, day=day))

    with contextlib.closing(line.attach(0)) as rank:
        link.bytes_sent = 2 * GB
        tick(1.0, "2026-01-01")
        assert hears(rank, REASON)
        tick(2.0, "2026-01-02")
        assert hears(rank, None)
        link.bytes_sent = 4 * GB
        tick(3.0, "2026-01-02")
        assert hears(rank, REASON)
    tick(4.0, "2026-01-03")
    with contextlib.closing(line.attach(0)) as later:
        tick(5.0, "2026-01-03")
        assert later.stop_reason is None


def test_a_rank_that_attaches_above_the_limit_hears_of_it_until_midnight(line: LocalLine) -> None:
    link = CountedLink()
    watched = watch(line, link)
    link.bytes_sent = 2 * GB
    line.call(lambda: watched.tick(now=1.0, day="2026-01-01"))
    with contextlib.closing(line.attach(0)) as rank:
        assert hears(rank, REASON)
        line.call(lambda: watched.tick(now=2.0, day="2026-01-02"))
        assert hears(rank, None)
