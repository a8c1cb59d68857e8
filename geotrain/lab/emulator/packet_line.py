"""One direction of an emulated link, packet by packet: what leaves when, and what never does.

A packet waits until those before it are through, takes its own time at the link's rate, then
travels for the delay. Time and chance are given, so that every rule can be tested with literals.
"""

from collections import deque
from random import Random

from geotrain.lab.emulator.chance import Jitter, Loss
from geotrain.lab.emulator.flows import FlowTable
from geotrain.lab.emulator.segments import Shape, run_of, shape_of, without
from geotrain.lab.settings import MSS_BYTES, MTU_BYTES, LinkSettings

_MAX_HELD_BYTES = 1 << 30
"""Against a delay so long, or a rate so high, that the machine's memory would be the queue."""


class PacketLine:
    """Takes packets as a TUN device gives them and says which ones to write, and when."""

    def __init__(self, settings: LinkSettings, rng: Random) -> None:
        self._loss = Loss(settings.loss, rng)
        self._jitter = Jitter(settings.jitter_s, rng)
        self._flows = FlowTable()
        self._line: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0
        self._last_due = 0.0
        self.held_bytes = 0
        self.num_packets = 0
        self.num_segments = 0
        self.wire_bytes = 0
        self.num_lost = 0
        """Segments lost by chance, or in a cut."""
        self.num_dropped = 0
        """Segments for which there was no room in the queue."""
        self.num_forgotten = 0
        """Packets of connections that were silent too long."""
        self._take(settings)

    def change(self, settings: LinkSettings) -> None:
        """New settings for what is pushed from now on; a cut also loses what is under way."""
        if settings.loss != self._settings.loss:
            self._loss.change(settings.loss)
        if settings.jitter_s != self._settings.jitter_s:
            self._jitter.change(settings.jitter_s)
        if settings.idle_drop_s is None:
            self._flows = FlowTable()
        if settings.cut:
            self.num_lost += sum(shape_of(packet).num_segments for _, packet in self._line)
            self._line.clear()
            self.held_bytes = 0
            self._free_at = 0.0
        self._take(settings)

    def push(self, packet: bytes, *, now: float) -> None:
        settings = self._settings
        shape = shape_of(packet)
        self.num_packets += 1
        self.num_segments += shape.num_segments
        if settings.cut:
            self.num_lost += shape.num_segments
            return
        if settings.idle_drop_s is not None and not self._flows.passes(
            packet, idle_drop_s=settings.idle_drop_s, now=now
        ):
            self.num_forgotten += 1
            return
        if settings.loss:
            lost = self._loss.among(shape.num_segments)
            if lost:
                self.num_lost += len(lost)
                for part in without(packet, lost, shape):
                    self._enqueue(part, shape_of(part), now)
                return
        self._enqueue(packet, shape, now)

    def pop_due(self, *, now: float) -> list[bytes]:
        """What leaves by now, in order."""
        line, due = self._line, []
        while line and line[0][0] <= now:
            packet = line.popleft()[1]
            self.held_bytes -= len(packet)
            due.append(packet)
        return due

    def next_due(self) -> float | None:
        return self._line[0][0] if self._line else None

    def _take(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._s_per_byte = 0.0
        self._queue_s = settings.queue_s
        if settings.rate_bytes_per_s is not None:
            self._s_per_byte = MSS_BYTES / MTU_BYTES / settings.rate_bytes_per_s
            if settings.queue_bytes is not None:
                self._queue_s = settings.queue_bytes * self._s_per_byte

    def _enqueue(self, packet: bytes, shape: Shape, now: float) -> None:
        free_at = max(self._free_at, now)
        room = self._room(shape, waiting_s=free_at - now)
        if room < shape.num_segments:
            self.num_dropped += shape.num_segments - room
            if room == 0:
                return
            packet = run_of(packet, 0, room, shape)
            shape = shape_of(packet)
        self._free_at = free_at + shape.wire_bytes * self._s_per_byte
        due = self._free_at + self._settings.delay_s + self._jitter.at(now)
        self._last_due = max(self._last_due, due)
        self._line.append((self._last_due, packet))
        self.held_bytes += len(packet)
        self.wire_bytes += shape.wire_bytes

    def _room(self, shape: Shape, *, waiting_s: float) -> int:
        """How many of its segments still find a place; what comes later would wait too long."""
        if self.held_bytes > _MAX_HELD_BYTES:
            return 0
        if self._s_per_byte == 0.0:
            return shape.num_segments
        left_s = self._queue_s - waiting_s
        if left_s < 0:
            return 0
        segment_s = shape.wire_bytes / shape.num_segments * self._s_per_byte
        # The first is served while it waits for nothing, so it needs no place of its own.
        return min(shape.num_segments, 1 + int(left_s / segment_s))
