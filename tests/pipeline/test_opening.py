"""What a region makes of a step that the first region announced: its own window."""

from types import SimpleNamespace

import pytest

from geotrain.pipeline.opening import read_opening


def own_window(*, samples: int = 128, count: int = 32, window: int = 12, **limits: int) -> int:
    place = SimpleNamespace(
        index=0,
        name="virginia",
        first_name="virginia",
        in_flight_limit=limits.get("in_flight"),
        in_flight_samples=limits.get("in_flight_samples"),
    )
    context = SimpleNamespace(
        place=place, parts=SimpleNamespace(info=SimpleNamespace(fingerprint="f"))
    )
    record = {
        "call": "step",
        "number": 1,
        "samples": samples,
        "targets": 128.0,
        "microbatches": count,
        "windows": [window, 1],
        "loss_scale": 1.0,
        "fingerprint": "f",
    }
    opening = read_opening(context, record, call="step", number=1)
    assert opening is not None and opening.windows == (window, 1)
    return opening.work.window


@pytest.mark.parametrize(
    ("given", "window"),
    [
        ({}, 12),
        ({"in_flight": 5}, 5),
        ({"in_flight_samples": 16}, 4),
        ({"in_flight_samples": 16, "count": 64}, 8),
        ({"in_flight_samples": 16, "in_flight": 3}, 3),
        # The largest microbatch counts: 130 samples in 32 parts are at most 5.
        ({"in_flight_samples": 16, "samples": 130}, 3),
        # One is always admitted.
        ({"in_flight_samples": 3}, 1),
        ({"in_flight_samples": 1000}, 12),
    ],
)
def test_a_regions_own_limits_hold_whatever_the_plan_says(given, window):
    assert own_window(**given) == window
