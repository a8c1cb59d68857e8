from geotrain.transport.feed import ChunkFeed
from geotrain.transport.session import Session
from geotrain.transport.workers import ChunkWorkers
from tests.transport.test_link import ZlibCoder


def test_a_feed_with_nothing_in_it_has_run_dry_though_no_lane_asks():
    feed = ChunkFeed(Session(), ChunkWorkers(ZlibCoder()), lambda: None)
    assert [feed.take_ran_dry() for _ in range(3)] == [True] * 3
