import pytest

from geotrain.transport.choice import OUTDATED, TWO_LANES, LaneFacts, why_not

OURS, THEIRS = LaneFacts(boot=5, dialled=True), LaneFacts(boot=5, dialled=False)
THEIRS_NEWER, THEIRS_OLDER = LaneFacts(boot=6, dialled=False), LaneFacts(boot=4, dialled=False)


@pytest.mark.parametrize(
    ("new", "current", "mine_is_lower", "is_greeting", "reason"),
    [
        (OURS, None, True, False, None),
        (THEIRS, None, True, False, None),
        (THEIRS, None, True, True, TWO_LANES),
        (THEIRS, None, False, True, None),
        (OURS, None, False, True, None),
        (OURS, THEIRS, True, False, None),
        (OURS, THEIRS, False, False, TWO_LANES),
        (THEIRS, OURS, True, False, TWO_LANES),
        (THEIRS, OURS, False, False, None),
        (OURS, OURS, False, False, None),
        (THEIRS, THEIRS, True, False, None),
        (THEIRS_NEWER, OURS, True, False, None),
        (THEIRS_OLDER, OURS, False, False, OUTDATED),
    ],
)
def test_one_of_two_lanes_stays(new, current, mine_is_lower, is_greeting, reason):
    assert (
        why_not(new, current=current, mine_is_lower=mine_is_lower, is_greeting=is_greeting)
        == reason
    )


@pytest.mark.parametrize("lower_greets", [True, False])
def test_both_sides_choose_the_same_of_two_lanes(lower_greets):
    """The lane that the lower region dialled ends up open on both sides, in either order."""
    lower_first = why_not(THEIRS, current=OURS, mine_is_lower=True, is_greeting=False)
    higher_second = why_not(THEIRS, current=OURS, mine_is_lower=False, is_greeting=lower_greets)
    assert (lower_first, higher_second) == (TWO_LANES, None)
