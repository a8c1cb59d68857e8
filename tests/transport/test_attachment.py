"""The attachment: what a rank and its daemon owe each other, over a real socket and arena."""

import contextlib
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.errors import AttachError
from geotrain.transport.arena import PAGE_BYTES
from geotrain.transport.attachment import Attachment
from geotrain.transport.attachment_incoming import InStream, Received
from geotrain.transport.attachment_streams import OutStream
from geotrain.transport.flow import MAX_UNRELEASED
from tests.transport.local_line import (
    TIMEOUT_S,
    LocalLine,
    all_ready,
    local_line,
    open_views,
    wait_for_state,
)

FORWARD, BACKWARD = 0, 1


@pytest.fixture
def line(tmp_path: Path) -> Iterator[LocalLine]:
    with local_line(tmp_path, 2) as line:
        yield line


@pytest.fixture(scope="module")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[OutStream, InStream, Any]]:
    """One stream, both of its ends, through two daemons; rings of four pages."""
    with local_line(tmp_path_factory.mktemp("line"), 2) as line:
        a = line.attach(0, arena_bytes=8 * PAGE_BYTES)
        b = line.attach(1, arena_bytes=8 * PAGE_BYTES)
        open_views(a, b)
        yield a.out(FORWARD), b.incoming(FORWARD), (a, b)
        a.close()
        b.close()


def send(out: OutStream, payload: bytes, *, microbatch: int = 0, kind: str = "forward") -> None:
    start = 0
    if payload:
        start, view = out.reserve(len(payload))
        view[:] = payload
    out.send(kind=kind, step=0, microbatch=microbatch, start=start, payload_bytes=len(payload))


def receive(attachment: Attachment, stream: int) -> Received:
    incoming = attachment.incoming(stream)
    assert attachment.wait(lambda: incoming.pending() > 0, timeout_s=TIMEOUT_S)
    received = incoming.take()
    assert received is not None
    return received


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=25), seed=st.integers())
def test_any_sizes_and_release_orders_arrive_bit_equal_and_never_deadlock(
    streams: tuple[OutStream, InStream, tuple[Attachment, Attachment]],
    shares: list[float],
    seed: int,
) -> None:
    out, incoming, (a, b) = streams
    rng = random.Random(seed)
    payloads = [
        bytes([1 + index]) * round(share * out.capacity) for index, share in enumerate(shares)
    ]
    num_sent = num_taken = num_released = 0
    held: list[Received] = []
    while num_released < len(payloads):
        while num_sent < len(payloads) and out.fits(len(payloads[num_sent])):
            send(out, payloads[num_sent])
            num_sent += 1
        in_flight = num_sent - num_taken
        assert b.wait(lambda n=in_flight: incoming.pending() == n, timeout_s=TIMEOUT_S)
        while (received := incoming.take()) is not None:
            assert bytes(received.payload) == payloads[num_taken]
            held.append(received)
            num_taken += 1
        # Nothing is in flight now, so unless a slot is released nothing more will fit.
        for _ in range(rng.randint(1, len(held))):
            held.pop(rng.randrange(len(held))).release()
            num_released += 1
        unacknowledged = num_sent - num_released
        assert a.wait(lambda n=unacknowledged: out.unacknowledged == n, timeout_s=TIMEOUT_S)
    assert out.fits(out.capacity)


def test_a_message_keeps_its_header_inline_payload_and_hints(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a, contextlib.closing(line.attach(1)) as b:
        view = open_views(a, b)
        out = a.out(FORWARD)
        out.send(kind="begin", step=3, microbatch=-1, header=b"head", inline=b"small")
        start, slot = out.reserve(100)
        slot[:] = bytes(range(100))
        out.send(
            kind="forward",
            step=3,
            microbatch=1,
            part=1,
            num_parts=2,
            start=start,
            payload_bytes=100,
            hints=((0, 50),),
        )
        first = receive(b, FORWARD)
        assert (first.message.kind, first.message.header) == ("begin", b"head")
        assert (first.message.view, first.message.seq, first.message.step) == (view, 0, 3)
        assert bytes(first.payload) == b"small"
        second = receive(b, FORWARD)
        assert (second.message.seq, second.message.part, second.message.num_parts) == (1, 1, 2)
        assert second.message.hints == ((0, 50),)
        assert bytes(second.payload) == bytes(range(100))
        assert (out.unacknowledged_of("begin"), out.unacknowledged_of("forward")) == (1, 1)
        first.release()
        assert a.wait(lambda: out.unacknowledged_of("begin") == 0, timeout_s=TIMEOUT_S)
        assert (out.unacknowledged, out.wire_bytes) == (1, 1)
        second.release()


def test_a_stream_stops_at_the_limit_of_unreleased_messages(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a, contextlib.closing(line.attach(1)) as b:
        open_views(a, b)
        out = a.out(FORWARD)
        for _ in range(MAX_UNRELEASED):
            assert out.fits(0)
            send(out, b"")
        assert not out.fits(0)
        receive(b, FORWARD).release()
        assert a.wait(lambda: out.fits(0), timeout_s=TIMEOUT_S)


def test_the_smaller_ring_of_the_two_bounds_a_sender(line: LocalLine) -> None:
    with (
        contextlib.closing(line.attach(0, arena_bytes=64 * PAGE_BYTES)) as a,
        contextlib.closing(line.attach(1, arena_bytes=8 * PAGE_BYTES)) as b,
    ):
        assert not a.out(FORWARD).fits(0)  # no view yet
        open_views(a, b)
        assert a.out(FORWARD).capacity == 32 * PAGE_BYTES
        assert a.out(FORWARD).max_part_bytes == PAGE_BYTES
        assert a.out(FORWARD).fits(4 * PAGE_BYTES)
        assert not a.out(FORWARD).fits(4 * PAGE_BYTES + 1)


def test_what_arrives_before_the_view_is_opened_here_is_kept(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a, contextlib.closing(line.attach(1)) as b:
        b.ready({})
        a.ready({})
        assert b.wait(lambda: all_ready(b), timeout_s=TIMEOUT_S)
        view = open_views(a)
        send(a.out(FORWARD), b"early")
        # The daemons answer in order, so this beat comes after the message.
        assert line.stacks(1)
        assert b.incoming(FORWARD).pending() == 0
        open_views(b)
        received = receive(b, FORWARD)
        assert (received.message.view, bytes(received.payload)) == (view, b"early")
        received.release()


def test_a_message_of_an_older_view_is_dropped_and_its_slot_comes_back(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a:
        with contextlib.closing(line.attach(1)) as b:
            old = open_views(a, b)
        wait_for_state(a, "b", "left")
        with contextlib.closing(line.attach(1)) as b:
            wait_for_state(a, "b", "attached")
            send(a.out(FORWARD), b"too late")
            assert a.wait(lambda: a.out(FORWARD).unacknowledged == 0, timeout_s=TIMEOUT_S)
            assert open_views(a, b) != old
            send(a.out(FORWARD), b"in time")
            received = receive(b, FORWARD)
            assert bytes(received.payload) == b"in time"
            received.release()


def test_senders_never_wait_for_a_daemon_that_does_not_read(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a, contextlib.closing(line.attach(1)) as b:
        open_views(a, b)
        resume = line.pause()
        header = bytes(40_000)
        for microbatch in range(200):
            a.out(FORWARD).send(kind="forward", step=0, microbatch=microbatch, header=header)
        assert not resume.is_set()
        resume.set()
        for microbatch in range(200):
            received = receive(b, FORWARD)
            assert received.message.microbatch == microbatch
            received.release()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"region": "b"}, "this daemon serves region a, not b"),
        ({"run_hash": "other"}, r"\[run\] of this process is not"),
        ({"version": "0.9"}, "the daemon runs geotrain 1.0"),
        ({"rank": 1, "world_size": 2}, "one rank per region"),
        ({"streams_in": []}, "the arena has rings out 0, this place needs out 0, in 1"),
    ],
)
def test_a_rank_that_does_not_belong_here_is_refused_with_the_reason(
    line: LocalLine, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(AttachError, match=complaint):
        line.attach(0, **changes)
    line.attach(0).close()


def test_a_second_rank_for_one_place_is_refused_while_the_first_lives(line: LocalLine) -> None:
    first = line.attach(0)
    with pytest.raises(AttachError, match=rf"already attached \(pid {os.getpid()}\)"):
        line.attach(0)
    first.close()
    second = line.attach(0)
    assert second.incarnation > first.incarnation
    second.close()


def test_without_a_daemon_the_error_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(AttachError, match=r"no daemon of region a .*geotrain daemon --config"):
        Attachment.connect(
            tmp_path / "none.sock",
            run_hash="",
            version="",
            region="a",
            rank=0,
            world_size=1,
            arena_bytes=PAGE_BYTES,
            streams_in=[],
            streams_out=[],
            timeout_s=0.2,
        )


def test_the_end_of_the_daemon_ends_every_wait(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a:
        line.close_daemon(0)
        with pytest.raises(AttachError, match="the daemon of region a is gone; start it again"):
            a.wait(lambda: False, timeout_s=TIMEOUT_S)
        with pytest.raises(AttachError, match="is gone"):
            a.ready({})


def test_stop_links_and_stacks_reach_the_rank(line: LocalLine) -> None:
    with contextlib.closing(line.attach(0)) as a:
        line.call(line.attachments[0].post, {"type": "links", "links": {"b": {"state": "down"}}})
        line.call(line.exchanges[0].stop, "enough")
        assert a.wait(lambda: a.stop_reason is not None, timeout_s=TIMEOUT_S)
        assert (a.stop_reason, a.links) == ("enough", {"b": {"state": "down"}})
        assert "test_stop_links_and_stacks_reach_the_rank" in line.stacks(0)[0]


def test_a_reported_failure_is_what_every_region_sees_until_the_next_attach(
    line: LocalLine,
) -> None:
    with contextlib.closing(line.attach(1)) as b:
        a = line.attach(0)
        error = {"region": "a", "kind": "exception", "detail": "boom", "step": 4}
        a.fail(error)
        a.close()
        entry = wait_for_state(b, "a", "failed")
        assert entry.error is not None
        assert (entry.error["detail"], entry.error["step"]) == ("boom", 4)
        assert line.stacks(1)  # a round trip later it is still so
        assert b.board()["a"].state == "failed"
        with contextlib.closing(line.attach(0)):
            again = wait_for_state(b, "a", "attached")
            assert again.error is None
            assert again.incarnation > entry.incarnation
