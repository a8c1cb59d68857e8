"""The regions' conversation around a step: begin goes down, votes come up, the set goes down.

Each turn has a number that all regions count alike, so a record is always matched to its turn.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from geotrain.control.votes import Vote, check_set
from geotrain.pipeline.edge import Edge
from geotrain.pipeline.runtime import Surroundings


class Line:
    """This region's place in the line. With one region there is nobody to talk to."""

    surroundings: Surroundings
    """The running pipeline's; set before the first turn."""

    def __init__(self, upstream: Edge | None, downstream: Edge | None, *, num_regions: int) -> None:
        self._up = upstream
        self._down = downstream
        self._num_regions = num_regions
        self._turn = 0
        self.opened_s = (0.0, 0.0)
        """When this region heard how the last turn began, and when it had told the next one
        (monotonic); in the first region both are the latter."""

    def begin(self, record: Mapping[str, Any] | None) -> dict[str, Any]:
        """Start a turn: the first region says what happens next, the others hear it.

        Args:
            record: What happens next; None in every region but the first.

        Returns:
            The record as all regions have it. The wait for it has no deadline: the first region
            may be in user code for as long as it likes.
        """
        self._turn += 1
        heard_s: float | None = None
        if self._up is not None:
            self._until(
                lambda: self._has(self._up, "begin"), "the next step", self._up, limited=False
            )
            heard_s, _ = self._up.arrival("begin", self._turn)
            record = self._up.take_record("begin", self._turn)
        assert record is not None
        if self._down is not None:
            self._down.send_record("begin", step=self._turn, record=record)
        told_s = time.monotonic()
        self.opened_s = (heard_s if heard_s is not None else told_s, told_s)
        return dict(record)

    def exchange(self, vote: Vote) -> list[Vote]:
        """Merge this region's vote into those from further down, and come by the full set.

        Returns:
            One vote of every region, the same set in all of them.
        """
        votes = [vote]
        if self._down is not None:
            what = f"votes from {self._down.name}"
            self._until(lambda: self._has(self._down, "vote"), what, self._down)
            votes += self._read(self._down, "vote")
        if self._up is not None:
            self._up.send_record("vote", step=self._turn, record=_record(votes))
            self._until(lambda: self._has(self._up, "decide"), "the decision", self._up)
            votes = self._read(self._up, "decide")
        check_set(votes, num_regions=self._num_regions)
        if self._down is not None:
            self._down.send_record("decide", step=self._turn, record=_record(votes))
        self.flush()
        return votes

    def flush(self) -> None:
        """Wait until everything sent has been handed to the daemon."""
        self._until(self._is_flushed, "room in the arena", self._down)

    def _is_flushed(self) -> bool:
        return all(edge is None or edge.is_flushed for edge in (self._up, self._down))

    def _has(self, edge: Edge | None, kind: str) -> bool:
        return edge is not None and edge.has(kind, self._turn)

    def _read(self, edge: Edge, kind: str) -> list[Vote]:
        record = edge.take_record(kind, self._turn)
        try:
            return [Vote.from_record(vote) for vote in record["votes"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise self.surroundings.error(
                "mismatch", f"unreadable {kind} from {edge.name}: {exc}"
            ) from exc

    def _until(
        self, ready: Callable[[], bool], what: str, needs: Edge | None, *, limited: bool = True
    ) -> None:
        needed = [needs] if needs is not None else []
        since = time.monotonic()
        while True:
            for edge in (self._up, self._down):
                if edge is not None:
                    edge.pump()
            if ready():
                return
            self.surroundings.wait(what, since=since if limited else time.monotonic(), needs=needed)


def _record(votes: list[Vote]) -> dict[str, Any]:
    return {"votes": [vote.to_record() for vote in votes]}
