"""How many microbatches a stage may have in flight."""

from collections.abc import Sequence


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
    and gains nothing from more than one in flight. No window exceeds the microbatches there are.
    """
    if window == "classic":
        windows = classic_windows(num_stages)
    elif isinstance(window, int):
        windows = (window,) * (num_stages - 1) + (1,)
    else:
        assert not isinstance(window, str) and len(window) == num_stages
        windows = tuple(window)
    return tuple(max(1, min(each, num_microbatches)) for each in windows)
