"""How many microbatches a stage may have in flight."""

import math
from collections.abc import Sequence

FIRST_MICROBATCHES = 8
"""Into which a batch is cut with "auto", until the regions know better: keeps two to four busy."""


def classic_windows(num_stages: int) -> tuple[int, ...]:
    """The windows of 1F1B: stage i holds the microbatches of the stages from i on.

    Enough without latency; with latency every microbatch then waits a round trip.
    """
    return tuple(num_stages - stage for stage in range(num_stages))


def resolve_windows(
    window: str | int | Sequence[int], *, num_stages: int, num_microbatches: int
) -> tuple[int, ...]:
    """The window of every stage under a plan's `window` setting.

    A number holds for all stages but the last, which runs each backward right after its forward
    and gains nothing from more than one in flight. No window exceeds the microbatches there are:
    "wide" is as many as that.
    """
    if window == "wide":
        window = num_microbatches
    if window == "classic":
        windows = classic_windows(num_stages)
    elif isinstance(window, int):
        windows = (window,) * (num_stages - 1) + (1,)
    else:
        assert not isinstance(window, str) and len(window) == num_stages
        windows = tuple(window)
    return tuple(max(1, min(each, num_microbatches)) for each in windows)


def windows_for_latency(
    delay_forward_s: Sequence[float], delay_backward_s: Sequence[float], *, slowest_s: float
) -> tuple[int, ...]:
    """The windows that hide the links' delay: no stage then waits a round trip per microbatch.

    Args:
        delay_forward_s: For each boundary the time from the sending of a tensor to its arrival:
            latency and transfer, and whatever else it meets on its way.
        delay_backward_s: The same for gradients, in the other direction.
        slowest_s: Forward and backward of one microbatch in the slowest stage.
    """
    assert slowest_s > 0
    num_stages = len(delay_forward_s) + 1
    extra = 0
    windows = [1]
    for boundary in reversed(range(num_stages - 1)):
        # Rounded at each boundary, not once over their sum: each hop's gradients are waited for by
        # themselves. The tolerance keeps 0.12 / 0.06 from becoming 3 by a rounding error.
        delay_s = delay_forward_s[boundary] + delay_backward_s[boundary]
        extra += max(0, math.ceil(delay_s / slowest_s - 1e-9))
        windows.append(num_stages - boundary + extra)
    return tuple(reversed(windows))
