"""Two ends of a link without any I/O: bytes move when and in what pieces a test says."""

import zlib
from dataclasses import dataclass, field

from geotrain.transport.bulk import Chunk
from geotrain.transport.estimator import RttEstimator
from geotrain.transport.events import Acked, CodedChunk, Delivered, Event, PeerNamed
from geotrain.transport.frame import chunk_header
from geotrain.transport.hello import Hello
from geotrain.transport.messages import Message, Presence, stream_id
from geotrain.transport.protocol import LaneProtocol
from geotrain.transport.session import Session
from geotrain.transport.transitions import LinkSettings, State

VIEW = 7
RING_BYTES = 4096
RUN = {"id": "r", "seed": 0, "regions": [{"name": "a"}, {"name": "b"}]}


def make_hello(region: str, /, **changes: object) -> Hello:
    fields: dict[str, object] = {
        "version": "0.1.0",
        "run_id": "r",
        "region": region,
        "index": 0 if region == "a" else 1,
        "to": "b" if region == "a" else "a",
        "boot": 1,
        "run": RUN,
    }
    return Hello(**{**fields, **changes})  # type: ignore[arg-type]


@dataclass
class End:
    """One side: its session, its present lane, and what a rank would have seen."""

    region: str
    session: Session = field(default_factory=Session)
    hello: Hello | None = None
    lane: LaneProtocol | None = None
    peer: "End | None" = None
    out: bytearray = field(default_factory=bytearray)
    ring: bytearray = field(default_factory=lambda: bytearray(RING_BYTES))
    board: list[Presence] = field(default_factory=list)
    rtt: RttEstimator = field(default_factory=RttEstimator)
    offered: list[bytes] = field(default_factory=list)
    delivered: list[tuple[int, bytes]] = field(default_factory=list)
    held: dict[int, Message] = field(default_factory=dict)
    acked: list[int] = field(default_factory=list)
    coding: list[Chunk] = field(default_factory=list)
    """Cut for the coder and not yet written; it may be too late for them when they are."""
    coded: list[CodedChunk] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    corrupt_next: bool = False

    @property
    def sends(self) -> int:
        return stream_id(0, 0 if self.region == "a" else 1)

    @property
    def receives(self) -> int:
        return 1 - self.sends

    def open_view(self, view: int = VIEW) -> None:
        self.session.open_view(
            view, {self.sends: RING_BYTES}, {self.receives: memoryview(self.ring)}
        )

    def connect(self, *, dialled: bool, now: float = 0.0) -> None:
        self.out.clear()
        self.lane = LaneProtocol(
            hello=self.hello or make_hello(self.region),
            dialled=dialled,
            session=self.session,
            board=lambda: self.board,
            settings=LinkSettings(),
            rtt=self.rtt,
            now=now,
        )

    def offer(self, payload: bytes, *, hinted: bool = False, microbatch: int = 0) -> None:
        seq = len(self.offered)
        self.offered.append(payload)
        inline = len(payload) <= 16
        message = Message(
            stream=self.sends,
            view=VIEW,
            seq=seq,
            kind="forward",
            step=0,
            microbatch=microbatch,
            header=b"h%d" % seq,
            inline=payload if inline else b"",
            payload_bytes=0 if inline else len(payload),
            hints=((len(payload) // 4, len(payload) // 2),) if hinted and not inline else (),
        )
        self.session.offer(message, None if inline else memoryview(payload))

    def write(self, *, limit: int = 300) -> bool:
        """One step of writing: control, to the coder, raw, coded. False: nothing to do."""
        assert self.lane is not None
        frame = self.lane.next_control()
        if frame is not None:
            self.out += frame
            return True
        if self.lane.state is not State.OPEN:
            return False
        return self.write_chunk(self.out, lane=0, limit=limit)

    def write_chunk(self, out: bytearray, *, lane: int, limit: int) -> bool:
        """One step with chunks: to the coder, raw, coded. False: nothing to do."""
        chunk = self.session.next_codable(limit)
        if chunk is not None:
            self.coding.append(chunk)
            return True
        chunk = self.session.next_raw(limit)
        coded = None
        if chunk is None:
            if not self.coding:
                return False
            chunk = self.coding.pop(0)
            if not self.session.is_current(chunk):
                return True
            coded = zlib.compress(chunk.raw)
            coded = coded if len(coded) < len(chunk.raw) else None
        out += self.frame_of(chunk, coded, lane=lane)
        return True

    def frame_of(self, chunk: Chunk, coded: bytes | None, *, lane: int) -> bytes:
        """A chunk on its way to a lane."""
        header = chunk_header(
            stream=chunk.stream,
            view=chunk.view,
            seq=chunk.seq,
            raw_offset=chunk.offset,
            raw=chunk.raw,
            coded_length=None if coded is None else len(coded),
        )
        body = bytearray(chunk.raw if coded is None else coded)
        self.session.chunk_written(chunk, lane=lane, payload_length=len(body))
        if self.corrupt_next:
            body[0] ^= 0xFF
        return header + bytes(body)

    def read(self, nbytes: int, *, now: float = 0.0) -> None:
        """Take up to `nbytes` of what the peer has written."""
        assert self.peer is not None and self.lane is not None
        data = bytes(self.peer.out[:nbytes])
        del self.peer.out[:nbytes]
        self.feed(data, now=now)

    def feed(self, data: bytes, *, now: float = 0.0) -> None:
        """What a driver does with bytes from the peer."""
        assert self.lane is not None
        rest = memoryview(data)
        while rest and self.lane.state is not State.CLOSED:
            room = self.lane.get_buffer()
            taken = min(len(room), len(rest))
            room[:taken] = rest[:taken]
            rest = rest[taken:]
            if self.lane.buffer_updated(taken, now=now):
                self.collect(now=now)

    def collect(self, *, now: float = 0.0) -> None:
        assert self.lane is not None
        for event in self.lane.events_received():
            self._take(event, now)

    def _take(self, event: Event, now: float) -> None:
        self.events.append(event)
        match event:
            case PeerNamed():
                assert self.lane is not None
                self.lane.admit(now=now)
            case Delivered(message=message):
                self.held[message.seq] = message
                self.delivered.append((message.seq, self.payload_of(message)))
            case Acked(seqs=seqs):
                self.acked.extend(seqs)
            case CodedChunk():
                self.coded.append(event)
            case _:
                pass

    def payload_of(self, message: Message) -> bytes:
        if not message.payload_bytes:
            return message.inline
        return bytes(self.ring[message.start : message.start + message.payload_bytes])

    def decode_one(self) -> None:
        """What a worker does: decode the oldest coded chunk into its place."""
        if not self.coded:
            return
        chunk = self.coded.pop(0)
        try:
            raw = zlib.decompress(chunk.coded)
            chunk.target[:] = raw
            ok = chunk.header.checksum_of(raw) == chunk.header.checksum
        except (zlib.error, ValueError):
            ok = False
        self.session.finish_chunk(chunk.header, ok=ok)
        for event in self.session.events_received():
            self._take(event, 0.0)

    def release(self, seq: int) -> None:
        message = self.held.pop(seq)
        # Nobody may have written into a slot that the rank still holds.
        assert self.payload_of(message) == self.delivered[seq][1]
        self.session.release(self.receives, VIEW, [seq])

    def closed_because(self) -> str:
        assert self.lane is not None and self.lane.state is State.CLOSED
        return self.lane.close_reason


def make_pair(*, connected: bool = True, views: bool = True) -> tuple[End, End]:
    a, b = End("a"), End("b")
    a.peer, b.peer = b, a
    if views:
        a.open_view()
        b.open_view()
    if connected:
        connect(a, b)
    return a, b


def connect(a: End, b: End, *, now: float = 0.0) -> None:
    """A new lane, dialled by `a`; nothing has been read yet."""
    a.connect(dialled=True, now=now)
    b.connect(dialled=False, now=now)


def shake_hands(a: End, b: End) -> None:
    """Nothing but the handshake; what follows it is still to be written."""
    for end in (a, b) if a.lane is not None and a.lane.dialled else (b, a):
        assert end.write() and end.peer is not None
        end.peer.read(len(end.out))


def disconnect(a: End, b: End) -> None:
    for end in (a, b):
        if end.lane is not None:
            end.lane.connection_lost("cut")
            end.collect()
        end.out.clear()


def settle(a: End, b: End, *, release: bool = False, now: float = 0.0) -> None:
    """Write, read and decode until nothing moves; with `release`, ranks release all they get."""
    moving = True
    while moving:
        moving = False
        for end in (a, b):
            while end.write():
                moving = True
        for end, other in ((a, b), (b, a)):
            while other.out:
                moving = True
                end.read(len(other.out), now=now)
            while end.coded:
                moving = True
                end.decode_one()
            for seq in list(end.held) if release else []:
                moving = True
                end.release(seq)
