"""Two ends of a link, its control lane and bulk lanes, without I/O: a test moves the bytes."""

from dataclasses import dataclass, field

from geotrain.transport.events import Event, LaneGone, LaneJoins
from geotrain.transport.hello import Join
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.transitions import LinkSettings, State
from tests.transport.lane_pair import End, connect, disconnect, make_hello, shake_hands


@dataclass
class LanesEnd(End):
    """One side; lane 0 is the control lane, `outs` what was written to a lane and not yet read."""

    bulk: dict[int, LaneProtocol] = field(default_factory=dict)
    outs: dict[int, bytearray] = field(default_factory=dict)

    def start_lane(self, number: int, *, dialled: bool) -> None:
        self.outs[number] = bytearray()
        self.bulk[number] = LaneProtocol(
            hello=make_hello(self.region),
            dialled=dialled,
            session=self.session,
            board=list,
            settings=LinkSettings(),
            rtt=self.rtt,
            now=0.0,
            join=Join(boot=1, epoch=1, lane=number) if dialled else None,
        )

    @property
    def other(self) -> "LanesEnd":
        assert isinstance(self.peer, LanesEnd)
        return self.peer

    def write_bulk(self, number: int, *, limit: int = 300) -> bool:
        lane = self.bulk.get(number)
        if lane is None:
            return False
        frame = lane.next_control()
        if frame is not None:
            self._out(number).extend(frame)
            return True
        if not lane.carries_chunks:
            return False
        return self.write_chunk(self._out(number), lane=number, limit=limit)

    def _out(self, number: int) -> bytearray:
        # Where the peer's end is gone, what is written goes nowhere.
        return self.outs.get(number, bytearray())

    def write_control(self, *, limit: int = 300) -> bool:
        """As a driver does: chunks go here only while no bulk lane takes them."""
        assert self.lane is not None
        if any(lane.carries_chunks for lane in self.bulk.values()):
            frame = self.lane.next_control()
            if frame is not None:
                self.out += frame
            return frame is not None
        return self.write(limit=limit)

    def read(self, nbytes: int, *, now: float = 0.0) -> None:
        super().read(nbytes, now=now)
        self.retry_held()

    def retry_held(self) -> None:
        for number, lane in list(self.bulk.items()):
            if lane.held:
                lane.retry_chunk()
                self.collect_bulk(number)

    def read_bulk(self, number: int, nbytes: int) -> int:
        """Take up to `nbytes` of what waits on a lane; returns how many were taken."""
        waiting = self.other.outs.get(number)
        taken = 0
        while waiting and taken < nbytes and number in self.bulk:
            lane = self.bulk[number]
            if lane.held:
                break
            room = lane.get_buffer()
            size = min(len(room), len(waiting), nbytes - taken)
            room[:size] = waiting[:size]
            del waiting[:size]
            taken += size
            if lane.buffer_updated(size, now=0.0):
                self.collect_bulk(number)
        return taken

    def collect_bulk(self, number: int) -> None:
        lane = self.bulk[number]
        for event in lane.events_received():
            self._take(event, 0.0)
        if lane.state is State.CLOSED:
            # Closed by the peer or by an error; what else came is never read.
            self.drop_lane(number)

    def drop_lane(self, number: int, reason: str = "reset") -> None:
        """This end of a lane ends now: it reads no more of it."""
        lane = self.bulk.pop(number, None)
        if lane is None:
            return
        lane.connection_lost(reason)
        for event in lane.events_received():
            self._take(event, 0.0)
        self.other.outs.pop(number, None)

    def _take(self, event: Event, now: float) -> None:
        match event:
            case LaneJoins():
                for lane in self.bulk.values():
                    if lane.state is State.JOINING:
                        lane.admit(now=now)
            case LaneGone(lane=number):
                if number in self.bulk:
                    self.drop_lane(number, "gone there")
        super()._take(event, now)

    def check(self) -> None:
        """P-17: of a message's bytes, each is in one place at most."""
        for stream in self.session._receives.values():
            for incoming in stream._live.values():
                parts = [incoming.arriving, incoming.pending, incoming.received]
                taken = [piece for part in parts for piece in part]
                for start, end in taken:
                    assert sum(part.overlaps(start, end) for part in parts) == 1
                if incoming.complete:
                    assert not len(incoming.arriving) and not len(incoming.pending)


class Lanes:
    """Both ends, and what can happen to their lanes."""

    def __init__(self, num_lanes: int = 2, *, kind: type[LanesEnd] = LanesEnd) -> None:
        self.a, self.b = kind("a"), kind("b")
        self.a.peer, self.b.peer = self.b, self.a
        self.ends = (self.a, self.b)
        self._count = 0
        self.num_damaged = 0
        for end in self.ends:
            end.open_view()
        connect(*self.ends)
        shake_hands(*self.ends)
        for _ in range(num_lanes):
            self.open_lane()

    @property
    def numbers(self) -> list[int]:
        return sorted({*self.a.bulk, *self.b.bulk})

    def open_lane(self) -> int:
        """The dialler starts one; its handshake is still to be written and read."""
        self._count += 1
        for end in self.ends:
            end.start_lane(self._count, dialled=end is self.a)
        return self._count

    def cut_control(self) -> None:
        """The epoch ends: all lanes with it, before the next control lane opens."""
        self.end_all()
        connect(*self.ends)

    def end_all(self, *, count_anew: bool = False) -> None:
        """No lane is left; with `count_anew` the next dialler does not know how many there were."""
        self._count *= not count_anew
        disconnect(*self.ends)
        for number in self.numbers:
            for end in self.ends:
                end.drop_lane(number)
        for end in self.ends:
            end.outs.clear()

    def settle(self, *, release: bool = False) -> None:
        """Write, read and decode until nothing moves."""
        moving = True
        while moving:
            moving = False
            for end in self.ends:
                while end.write_control():
                    moving = True
                for number in list(end.bulk):
                    while end.write_bulk(number):
                        moving = True
            for end in self.ends:
                for number in list(end.bulk):
                    moving |= end.read_bulk(number, 1 << 20) > 0
                if end.other.out:
                    moving = True
                    end.read(len(end.other.out))
                while end.coded:
                    moving = True
                    end.decode_one()
                for seq in list(end.held) if release else []:
                    moving = True
                    end.release(seq)
                end.check()
