"""The schedules that torch.distributed.pipelining is given as CSV files."""

from collections.abc import Sequence

NUM_WIDTHS = 6


def warm_up_widths(best_guess: int, *, num_stages: int, num_microbatches: int) -> list[int]:
    """Six widths of the first stage's warm-up to try, or as many as there are.

    Around the one that should hide the latency, from 1F1B's own up to all microbatches at once.
    """
    low, high = min(num_stages, num_microbatches), num_microbatches
    best_guess = max(low, min(best_guess, high))
    wanted = [best_guess + step for step in (0, 1, -1, 2)] + [2 * best_guess, high, low]
    wanted += [best_guess + step for step in range(3, high + 1)]
    wanted += [best_guess - step for step in range(2, high + 1)]
    found: list[int] = []
    for width in wanted:
        bounded = max(low, min(width, high))
        if bounded not in found:
            found.append(bounded)
    return sorted(found[:NUM_WIDTHS])


def stage_widths(first: int, *, num_stages: int, num_microbatches: int) -> list[int]:
    """The warm-up of every stage, falling evenly from the first one's to one in the last."""
    if num_stages == 1:
        return [1]
    drops = [(first - 1) * stage / (num_stages - 1) for stage in range(num_stages)]
    # At least as many as there are stages from here on, or the line would not fill.
    widths = [max(num_stages - i, round(first - drop)) for i, drop in enumerate(drops)]
    return [min(width, num_microbatches) for width in widths]


def rows(widths: Sequence[int], num_microbatches: int) -> list[list[str]]:
    """One row of actions a stage: forwards as wide as the warm-up, then one backward, one forward.

    >>> rows([2, 1], 2)
    [['0F0', '0F1', '0B0', '0B1'], ['1F0', '1B0', '1F1', '1B1']]
    """
    return [_row(stage, width, num_microbatches) for stage, width in enumerate(widths)]


def _row(stage: int, width: int, num_microbatches: int) -> list[str]:
    actions = [f"{stage}F{index}" for index in range(min(width, num_microbatches))]
    for index in range(num_microbatches):
        actions.append(f"{stage}B{index}")
        if index + width < num_microbatches:
            actions.append(f"{stage}F{index + width}")
    return actions
