import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.control.figures import Figures
from geotrain.control.votes import Vote, check_set, decide

NAMES = ("virginia", "frankfurt", "tokyo")

norms = st.lists(
    st.tuples(st.integers(0, 30), st.just("float32"), st.floats(0, 100, width=32)),
    max_size=4,
    unique_by=lambda norm: norm[0],
).map(tuple)
votes = st.lists(norms, min_size=3, max_size=3).map(
    lambda per_region: [
        Vote(region=region, finite=True, norms=each, loss_sum=float(region), wire_bytes=region)
        for region, each in enumerate(per_region)
    ]
)


@given(votes, st.permutations(range(3)))
def test_every_region_decides_alike_whatever_order_the_votes_came_in(cast, order):
    shuffled = [Vote.from_record(cast[i].to_record()) for i in order]
    assert decide(shuffled, num_targets=4, region_names=NAMES) == decide(
        cast, num_targets=4, region_names=NAMES
    )


@given(votes)
def test_a_vote_survives_the_wire(cast):
    assert [Vote.from_record(vote.to_record()) for vote in cast] == cast


def test_so_do_its_figures():
    vote = Vote(region=1, finite=True, figures=Figures(forward_us=(20_000,), slots_up=3))
    assert Vote.from_record(vote.to_record()) == vote
    with pytest.raises(ValueError, match="malformed"):
        Vote.from_record(vote.to_record() | {"figures": {}})


def test_norms_come_in_model_order():
    cast = [
        Vote(region=1, finite=True, norms=((2, "float32", 3.0), (0, "float32", 1.0))),
        Vote(region=0, finite=True, norms=((1, "float32", 2.0),)),
    ]
    decision = decide(cast, num_targets=1, region_names=NAMES)
    assert [norm for _, norm in decision.norms] == [1.0, 2.0, 3.0]


def test_one_broken_region_skips_the_step_everywhere_and_is_named():
    cast = [Vote(region=0, finite=True), Vote(region=1, finite=False)]
    decision = decide(cast, num_targets=8, region_names=NAMES)
    assert not decision.commit
    assert decision.reason == "NaN or Inf in frankfurt"


def test_no_targets_is_a_skip():
    decision = decide([Vote(region=0, finite=True)], num_targets=0, region_names=NAMES)
    assert not decision.commit and math.isnan(decision.loss)


def test_any_region_may_ask_to_stop():
    cast = [Vote(region=0, finite=True), Vote(region=1, finite=True, stop="budget")]
    decision = decide(cast, num_targets=8, region_names=NAMES)
    assert decision.commit and decision.stop == "frankfurt: budget"


@pytest.mark.parametrize("regions", [[0], [0, 0], [0, 1, 1], [0, 2]])
def test_a_missing_or_double_vote_is_refused(regions):
    with pytest.raises(ValueError, match="votes of regions"):
        check_set([Vote(region=region, finite=True) for region in regions], num_regions=2)


@pytest.mark.parametrize("field", ["region", "index", "norm", "lrs", "stop"])
def test_a_malformed_vote_is_refused(field):
    record = Vote(region=0, finite=True, norms=((1, "float32", 1.0),)).to_record()
    del record[field]
    with pytest.raises(ValueError, match="malformed vote"):
        Vote.from_record(record)
