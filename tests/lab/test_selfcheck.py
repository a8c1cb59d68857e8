"""What the lab's check says and judges; what it measures is in test_wan.py."""

import pytest

from geotrain.lab.selfcheck import (
    Checked,
    MeasuringTimeoutError,
    ask,
    is_rate_judged,
    serving,
    why_not_measured,
)
from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import open_wan

OPEN, CUT, LOSSY = LinkSettings(), LinkSettings(cut=True), LinkSettings(loss=0.001)
WAY = ("virginia", "frankfurt")


def checked(*, rate: float = 4.65e6, rtt_s: float = 0.10052, rate_judged: bool = True) -> Checked:
    return Checked(
        direction=WAY,
        kind="netns",
        rtt_asked_s=0.1,
        rtt_s=rtt_s,
        rtt_min_s=rtt_s,
        rtt_p99_s=rtt_s,
        rate_asked=125e6,
        rate=rate,
        rate_judged=rate_judged,
    )


def test_what_is_cut_either_way_is_not_measured():
    assert why_not_measured(WAY, OPEN, OPEN) is None
    assert why_not_measured(WAY, CUT, OPEN) == "virginia to frankfurt is cut"
    assert why_not_measured(WAY, CUT, CUT) == "virginia to frankfurt is cut"
    assert why_not_measured(WAY, OPEN, CUT) == "virginia to frankfurt: the way back is cut"


@pytest.mark.parametrize("forward", [OPEN, LOSSY])
@pytest.mark.parametrize("back", [OPEN, LOSSY])
def test_a_rate_is_judged_where_tcp_can_reach_it(forward, back):
    assert is_rate_judged(forward, back, "bbr")
    for other in ("cubic", None):
        assert is_rate_judged(forward, back, other) == (forward is back is OPEN)


def test_a_rate_that_is_not_judged_does_not_count():
    words = (
        "virginia to frankfurt: asked round trip 100 ms and 1000 Mbit/s, "
        "measured 100.52 ms and 37.2 Mbit/s: "
    )
    judged, not_judged = checked(), checked(rate_judged=False)
    assert (judged.holds, str(judged)) == (False, words + "NOT as asked")
    rest = "round trip as asked, rate not judged: TCP under loss"
    assert (not_judged.holds, str(not_judged)) == (True, words + rest)
    late = checked(rate_judged=False, rtt_s=0.2)
    assert not late.holds
    assert "round trip NOT as asked" in str(late)


def test_a_measurement_that_nothing_comes_through_for_ends_at_its_deadline():
    with open_wan("relay", sites=WAY) as wan:
        wan.cut(source="virginia", target="frankfurt")
        with serving(wan, WAY) as address:
            with pytest.raises(MeasuringTimeoutError, match="from virginia took over 1 s"):
                ask(wan, "virginia", ["rtt", *address, "3"], limit_s=1.0)
