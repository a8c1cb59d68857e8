"""Between the rank and the links: the board, the view, and every message either way.

One object on the event loop. It holds no message: a payload lies in the rank's arena until the
peer's rank has released it, and what comes in is received into the rank's arena.
"""

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from geotrain.daemon.attachments import Rank
from geotrain.daemon.reports import Reports
from geotrain.daemon.routing import Board, Route, View, next_view
from geotrain.errors import RegionError
from geotrain.transport.arena import IN
from geotrain.transport.messages import MAX_DETAIL_BYTES, Message, Presence, pack
from geotrain.transport.receiving import ReceiveStream
from geotrain.transport.restoring import Restored
from geotrain.transport.sending import SendStream

logger = logging.getLogger(__name__)


class ExchangeLink(Protocol):
    """What the exchange needs of a link."""

    def publish(self, entry: Presence) -> None: ...
    def open_view(
        self, view: int, sends: Mapping[int, int], receives: Mapping[int, memoryview]
    ) -> None: ...
    def restore_view(
        self, view: int, sends: Sequence[SendStream], receives: Sequence[ReceiveStream]
    ) -> None: ...
    def close_view(self) -> None: ...
    def offer(self, message: Message, payload: memoryview | None) -> None: ...
    def release(self, stream: int, view: int, seqs: Sequence[int]) -> None: ...
    def stats(self) -> Mapping[str, Any]: ...


class Exchange:
    """Implements `attachments.RankEvents` towards the rank; links call `on_link_*`."""

    def __init__(self, board: Board, regions: Sequence[str], routes: Sequence[Route]) -> None:
        self.board = board
        self.view: View | None = None
        self.stop_reason: str | None = None
        self.reports = Reports()
        self._links: dict[str, ExchangeLink] = {}
        self._routes = {regions[route.peer_index]: route for route in routes}
        self._rank: Rank | None = None
        self._is_open = False
        """Whether the links have the view: not while our rank is gone."""
        self._told: dict[str, tuple[str, str]] = {}

    def add_link(self, peer: str, link: ExchangeLink) -> None:
        self._links[peer] = link

    # From our rank.

    def on_attached(self, rank: Rank) -> None:
        self._rank = rank
        entry = self.board.attach(rank.server.in_capacities(), now_ms=time.time_ns() // 1_000_000)
        self._welcome(rank, entry.incarnation)
        self._tell_rank(self.board.entries)
        if self.stop_reason is not None:
            rank.server.post({"type": "stop", "reason": self.stop_reason})
        self._publish([entry], to_rank=False)

    def on_returned(self, rank: Rank, incarnation: int) -> str | None:
        reason = self.board.why_not_returned(incarnation)
        if reason is None:
            self._welcome(rank, incarnation)
        return reason

    def on_resumed(self, rank: Rank, restored: Restored) -> None:
        own = restored.own
        if own.rings != rank.server.in_capacities():
            raise ValueError("its arena is not the one that the other regions know of")
        reason = self.board.why_not_returned(own.incarnation)
        if reason is not None:
            raise ValueError(reason)
        self._rank = rank
        entry = self.board.restore(own, restored.board)
        view = View(tuple(one.incarnation for one in self.board.entries))
        if restored.view == view.id:
            # It formed under the earlier daemon, so it does not matter who is ready now.
            self.view = view
            self._is_open = True
            logger.info("= view %016x goes on", view.id)
            for peer, route in self._routes.items():
                self._restore_link(rank, peer, route, restored)
        self._tell_rank(self.board.entries)
        if self.stop_reason is not None:
            self._tell_stop(self.stop_reason)
        self._publish([entry], to_rank=False)

    def on_ready(self, identity: Mapping[str, Any]) -> None:
        if len(pack(identity)) > MAX_DETAIL_BYTES:
            raise ValueError(f"an identity of more than {MAX_DETAIL_BYTES} bytes")
        # Again for each further pipeline of one process, whose identity is another.
        if self.board.own.state in ("attached", "ready"):
            self._publish([self.board.update(state="ready", identity=dict(identity))])

    def on_send(self, rank: Rank, message: Message) -> None:
        link, route = self._link_of(message.stream)
        if message.stream != route.sends:
            raise ValueError(f"stream {message.stream} is not ours to send")
        payload = rank.server.slot(message.stream, message.start, message.payload_bytes)
        if self._is_current(message.view):
            link.offer(message, payload if message.payload_bytes else None)
        else:
            # P-8: a message of another view is dropped, its slot and credit go back.
            self.on_link_acked(message.stream, message.view, [message.seq], [0])

    def on_release(self, rank: Rank, stream: int, view: int, seqs: list[int]) -> None:
        link, route = self._link_of(stream)
        if stream != route.receives:
            raise ValueError(f"stream {stream} is not ours to receive")
        if self._is_current(view):
            link.release(stream, view, seqs)

    def on_report(self, report: Mapping[str, Any]) -> None:
        self.reports.on_report(report)

    def on_failed(self, error: RegionError) -> None:
        self._publish([self.board.update(state="failed", error=error.to_record(), note="")])

    def on_left(self, reason: str) -> None:
        self._publish([self.board.update(state="left", note=reason)])

    def on_detached(self, error: RegionError) -> bool:
        self._rank = None
        # Before the arena goes: a lane must not write into it any more.
        self._close_links()
        was_in = self.board.own.state in ("attached", "ready")
        if was_in:
            self.on_failed(error)
        return was_in

    # From the links.

    def on_link_board(self, entries: Iterable[Presence]) -> None:
        self._publish(self.board.merge(entries))

    def on_link_delivered(self, message: Message) -> None:
        if self._rank is not None:
            record = {"type": "deliver", "message": message.to_map(with_start=True)}
            self._rank.server.post(record)

    def on_link_acked(
        self, stream: int, view: int, seqs: Sequence[int], wire_bytes: Sequence[int]
    ) -> None:
        if self._rank is not None:
            self._rank.server.post(
                {
                    "type": "acked",
                    "stream": stream,
                    "view": view,
                    "seqs": list(seqs),
                    "wire_bytes": list(wire_bytes),
                }
            )

    # From the clock.

    def note(self, text: str) -> None:
        """What is wrong with our rank, for people; empty when nothing is."""
        own = self.board.own
        if own.state in ("attached", "ready") and own.note != text:
            self._publish([self.board.update(note=text)])

    def fail(self, kind: str, detail: str) -> None:
        """End our region's part of the run, unless it has ended already."""
        own = self.board.own
        if own.state in ("attached", "ready"):
            self.on_failed(RegionError(region=own.region, kind=kind, detail=detail))

    def stop(self, reason: str) -> None:
        """Ask our rank, and any that attaches later, to stop at the next step border."""
        if self.stop_reason is None:
            self.stop_reason = reason
            logger.warning("= stopping at the next step border: %s", reason)
            self._tell_stop(reason)

    def give_up_earlier(self) -> None:
        """The rank that an earlier daemon had did not come: the others wait in vain."""
        earlier = self.board.earlier
        if self.board.own.state == "absent" and earlier.state in ("attached", "ready"):
            error = RegionError(
                region=earlier.region,
                kind="lost",
                detail="its daemon was started again, but its training process did not come back",
            )
            self._publish([self.board.give_up(error.to_record())])

    def allow(self) -> None:
        """The reason to stop is over (a new day); a rank that has not stopped yet goes on."""
        if self.stop_reason is not None:
            self.stop_reason = None
            logger.info("= the reason to stop is over")
            self._tell_stop("")

    # Inside.

    def _tell_stop(self, reason: str) -> None:
        """Tell our rank why to stop; empty: for no reason any more."""
        if self._rank is not None:
            self._rank.server.post({"type": "stop", "reason": reason})

    def _welcome(self, rank: Rank, incarnation: int) -> None:
        regions = [one.region for one in self.board.entries]
        rank.server.post(
            {
                "type": "attached",
                "incarnation": incarnation,
                "region_index": regions.index(self.board.own.region),
                "num_regions": len(regions),
            }
        )
        # Ahead of the board, so that a rank that has the board knows of links that are refused.
        links = {peer: link.stats() for peer, link in self._links.items()}
        rank.server.post({"type": "links", "links": links})

    def _restore_link(self, rank: Rank, peer: str, route: Route, restored: Restored) -> None:
        if route.sends not in restored.sends or route.receives not in restored.receives:
            raise ValueError(f"it kept nothing of its streams with region {peer}")
        ring = rank.server.ring(route.receives, IN)
        assert ring is not None, "checked when the rank attached"

        def payload(message: Message) -> memoryview | None:
            if not message.payload_bytes:
                return None
            return rank.server.slot(route.sends, message.start, message.payload_bytes)

        sends = SendStream.restored(
            stream=route.sends,
            view=restored.view,
            past=restored.sends[route.sends],
            payload=payload,
        )
        receives = ReceiveStream.restored(
            stream=route.receives, memory=ring, past=restored.receives[route.receives]
        )
        self._links[peer].restore_view(restored.view, [sends], [receives])

    def _publish(self, changed: list[Presence], *, to_rank: bool = True) -> None:
        """Our rank hears of a change first: of a view before any message of it."""
        if not changed:
            return
        if to_rank:
            self._tell_rank(changed)
        for entry in changed:
            self._log(entry)
            for link in self._links.values():
                link.publish(entry)
        self._update_view()

    def _tell_rank(self, entries: Iterable[Presence]) -> None:
        if self._rank is not None:
            for entry in entries:
                # One a record: each may carry 32 KiB of identity and error.
                self._rank.server.post({"type": "board", "entries": [entry.to_map()]})

    def _update_view(self) -> None:
        view = next_view(self.view, self.board.entries)
        if view == self.view:
            return
        self._close_links()
        self.view = view
        if view is None or self._rank is None:
            return
        logger.info("= view %016x: all regions are ready", view.id)
        self._is_open = True
        for peer, route in self._routes.items():
            ring = self._rank.server.ring(route.receives, IN)
            assert ring is not None, "checked when the rank attached"
            capacity = self.board.entry(peer).rings.get(route.sends, 0)
            self._links[peer].open_view(view.id, {route.sends: capacity}, {route.receives: ring})

    def _close_links(self) -> None:
        if self._is_open:
            self._is_open = False
            for link in self._links.values():
                link.close_view()

    def _is_current(self, view: int) -> bool:
        return self._is_open and self.view is not None and self.view.id == view

    def _link_of(self, stream: int) -> tuple[ExchangeLink, Route]:
        for peer, route in self._routes.items():
            if stream in (route.sends, route.receives):
                return self._links[peer], route
        raise ValueError(f"stream {stream} does not touch this region")

    def _log(self, entry: Presence) -> None:
        """One line a change that people care about."""
        error = RegionError.from_record(entry.error) if entry.error else None
        told = (entry.state, str(error) if error else entry.note)
        if entry.state == "absent" or self._told.get(entry.region) == told:
            return
        self._told[entry.region] = told
        is_bad = entry.state == "failed" or (entry.note and entry.state != "left")
        sign, level = ("!", logging.WARNING) if is_bad else ("=", logging.INFO)
        text = f": {told[1]}" if told[1] else ""
        logger.log(level, "%s region %s: %s%s", sign, entry.region, entry.state, text)
