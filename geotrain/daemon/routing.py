"""Who is there, which view that makes, and which stream goes where. Pure.

The *board* holds one entry per region. Only a region's own daemon makes new versions of its entry,
and the newer version wins everywhere, so entries may travel in any order and any number of times.
The incarnations of all regions together are the *view*; messages of different views never meet.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from geotrain.transport.messages import BACKWARD, FORWARD, Presence, stream_id, view_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The two streams between this region and one neighbour."""

    peer_index: int
    sends: int
    receives: int


def routes(index: int, num_regions: int) -> tuple[Route, ...]:
    """The routes of region `index`, to the region before it and the one after it."""
    found = []
    if index > 0:
        before = index - 1
        found.append(
            Route(
                peer_index=before,
                sends=stream_id(before, BACKWARD),
                receives=stream_id(before, FORWARD),
            )
        )
    if index + 1 < num_regions:
        found.append(
            Route(
                peer_index=index + 1,
                sends=stream_id(index, FORWARD),
                receives=stream_id(index, BACKWARD),
            )
        )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class View:
    """The incarnations that belong together, in region order."""

    incarnations: tuple[int, ...]

    @property
    def id(self) -> int:
        return view_id(self.incarnations)


def next_view(current: View | None, entries: Iterable[Presence]) -> View | None:
    """The view that holds now: formed once all are ready, kept until an incarnation changes.

    It outlives failures and leaving, so that what is under way still arrives.
    """
    entries = tuple(entries)
    view = View(tuple(entry.incarnation for entry in entries))
    if view == current or all(entry.state == "ready" for entry in entries):
        return view
    return None


def newer(a: Presence, b: Presence) -> Presence:
    """The version of an entry that holds; the same whatever the order of the arguments."""
    # Two versions of one rank differ only where a daemon broke the rules; even then all must agree.
    return max(a, b, key=lambda entry: (entry.rank, repr(sorted(entry.to_map().items()))))


class Board:
    """This daemon's copy of all entries, and the one that is its own."""

    def __init__(self, regions: Sequence[str], own: str) -> None:
        """
        Args:
            regions: Names in region order.
        """
        # Our own entry says nothing before a rank attaches: one that an earlier daemon had may
        # come back, and until then what the others know of it stays true.
        self._entries = {region: Presence(region=region) for region in regions}
        self._own = own
        self._earlier = self._entries[own]

    @property
    def entries(self) -> tuple[Presence, ...]:
        return tuple(self._entries.values())

    @property
    def own(self) -> Presence:
        return self._entries[self._own]

    @property
    def earlier(self) -> Presence:
        """The newest entry of this region by an earlier daemon, as peers know it."""
        return self._earlier

    def entry(self, region: str) -> Presence:
        return self._entries[region]

    def merge(self, entries: Iterable[Presence]) -> list[Presence]:
        """Take in a peer's entries; returns those that changed, which others must hear of.

        An entry of our own that is newer than ours is by an earlier daemon of this region: ours
        moves past it, once there is a rank. Regions that are not in the run are ignored.
        """
        changed: dict[str, Presence] = {}
        for entry in entries:
            mine = self._entries.get(entry.region)
            if mine is None or newer(mine, entry) == mine:
                continue
            if entry.region == self._own:
                self._earlier = newer(self._earlier, entry)
                if mine.state == "absent":
                    continue
                if entry.incarnation == mine.incarnation:
                    entry = replace(mine, revision=entry.revision + 1)
                else:
                    entry = replace(mine, incarnation=entry.incarnation + 1, revision=0)
            self._entries[entry.region] = entry
            changed[entry.region] = entry
        return list(changed.values())

    def attach(self, rings: Mapping[int, int], *, now_ms: int) -> Presence:
        """A rank attached: a new incarnation, which ends every older view."""
        incarnation = max(self.own.incarnation + 1, self._earlier.incarnation + 1, now_ms)
        entry = Presence(
            region=self._own, incarnation=incarnation, state="attached", rings=dict(rings)
        )
        self._entries[self._own] = entry
        return entry

    def why_not_returned(self, incarnation: int) -> str | None:
        """Why a rank that an earlier daemon knew cannot go on here; None if it can."""
        newest = max(self.own.incarnation, self._earlier.incarnation)
        if self.own.state != "absent" or newest > incarnation:
            return "another process has taken this place meanwhile, or it was given up"
        return None

    def restore(self, own: Presence, others: Iterable[Presence]) -> Presence:
        """A rank that an earlier daemon knew has told what it kept. Returns our entry."""
        self.merge(entry for entry in others if entry.region != self._own)
        revision = own.revision
        if self._earlier.incarnation == own.incarnation:
            revision = max(revision, self._earlier.revision)
        entry = replace(own, revision=revision + 1)
        self._entries[self._own] = entry
        return entry

    def give_up(self, error: Mapping[str, Any]) -> Presence:
        """The rank that an earlier daemon had is gone: say so in its entry."""
        entry = replace(
            self._earlier, revision=self._earlier.revision + 1, state="failed", error=dict(error)
        )
        self._entries[self._own] = entry
        return entry

    def update(self, **changes: Any) -> Presence:
        """A new revision of our own entry: `state`, `identity`, `error`, `note`."""
        entry = replace(self.own, revision=self.own.revision + 1, **changes)
        self._entries[self._own] = entry
        return entry
