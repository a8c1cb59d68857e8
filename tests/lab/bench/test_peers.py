"""What the steps of a way of running come to."""

import pytest

from geotrain.lab.bench.options import BenchOptions, Work
from geotrain.lab.bench.peers import Peer, peer_of

OPTIONS = BenchOptions(
    work=Work(
        forward_s=[0.02, 0.02],
        backward_s=[0.04, 0.04],
        boundary_bytes=8,
        num_microbatches=2,
        steps=4,
    ),
    limit_s=60.0,
)


@pytest.mark.parametrize(
    ("step_s", "peer"),
    [
        ([9.0, 2.0, 4.0, 3.0], Peer(step_s=3.0, note="")),
        ([9.0, 2.0, 4.0], Peer(step_s=3.0, note="3 of 4 steps within 60 s")),
        ([9.0], Peer(step_s=None, note="none within 60 s (1 of 4 steps done)")),
        ([], Peer(step_s=None, note="none within 60 s (0 of 4 steps done)")),
    ],
)
def test_the_median_of_those_in_time_without_the_first(step_s, peer):
    assert peer_of(step_s, OPTIONS) == peer
