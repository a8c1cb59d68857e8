"""This rank among the regions: attached to its daemon, watching all others through the board."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from geotrain.config import Config
from geotrain.errors import AttachError, RegionError
from geotrain.pipeline.result import StepResult
from geotrain.pipeline.segment import SegmentInfo
from geotrain.transport.attachment import Attachment
from geotrain.transport.messages import BACKWARD, FORWARD, Presence, stream_id, view_id
from geotrain.version import __version__

logger = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 10.0
_LEAVE_TIMEOUT_S = 10.0
_LEAVE_LOOK_S = 0.5


class Membership:
    """The attachment of this rank, and what it makes of the other regions' presence."""

    def __init__(self, config: Config, attachment: Attachment) -> None:
        self._config = config
        self._index = config.index
        self._names = [region.name for region in config.run.regions]
        self._view: dict[str, int] = {}
        self._seen_alive: set[tuple[str, int]] = set()
        self._count = 0
        self._failed = False
        self.attachment = attachment

    @classmethod
    def join(cls, config: Config, *, timeout_s: float) -> "Membership":
        """Attach to this region's daemon.

        Raises:
            AttachError: It cannot be reached, or refused this rank.
            RegionError: A neighbour has refused this region already; the attachment is closed.
        """
        index, last = config.index, config.run.num_regions - 1
        streams_in, streams_out = [], []
        if index > 0:
            streams_in.append(stream_id(index - 1, FORWARD))
            streams_out.append(stream_id(index - 1, BACKWARD))
        if index < last:
            streams_in.append(stream_id(index, BACKWARD))
            streams_out.append(stream_id(index, FORWARD))
        attachment = Attachment.connect(
            config.socket_path,
            run_hash=config.run.hash,
            version=__version__,
            region=config.site.name,
            rank=0,
            world_size=1,
            arena_bytes=config.site.arena_mib << 20,
            streams_in=streams_in,
            streams_out=streams_out,
            timeout_s=timeout_s,
            return_s=config.site.liveness.wait_s,
        )
        where = f"{config.site.name} ({index + 1} of {config.run.num_regions})"
        logger.info("= attached to the daemon of region %s", where)
        membership = cls(config, attachment)
        try:
            # Here rather than once the model is built, which may take long.
            membership._check_refusals()
        except RegionError:
            attachment.close()
            raise
        return membership

    @property
    def stop_reason(self) -> str | None:
        """Why the daemon asks this run to stop in order, if it does."""
        return self.attachment.stop_reason

    @property
    def view(self) -> int:
        """The name of the view, once `assemble` has opened it."""
        return view_id(list(self._view.values()))

    # ---- becoming a run

    def assemble(self, info: SegmentInfo) -> None:
        """Say that this region is ready, wait until all are, and check that they fit together.

        The first time this fixes the view: from then on any other incarnation is an error.

        Raises:
            RegionError: The models or versions differ, a region ended, or liveness.wait_s passed.
        """
        self._count += 1
        identity: dict[str, Any] = {
            "fingerprint": info.fingerprint,
            "torch": torch.__version__.split("+")[0],
            "pipeline": self._count,
        }
        self._announce(identity)
        since = time.monotonic()
        said = since
        self.post_action("waiting for all regions to be ready")
        while not self._all_ready():
            self._check_refusals()
            now = time.monotonic()
            if now - said >= _PROGRESS_INTERVAL_S:
                said = now
                logger.info("= waiting for %s (%.0f s)", self._missing(), now - since)
            if now - since > self._config.site.liveness.wait_s:
                raise self._error("lost", f"waited {now - since:.0f} s for {self._missing()}")
            self.wait(
                lambda: self._all_ready() or self._incarnations() != identity["sees"],
                timeout_s=1.0,
                needs=self._names,
            )
            if self._incarnations() != identity["sees"]:
                self._announce(identity)
        self._compare(identity)
        if not self._view:
            self._open_view()
        self.post_action("in user code: ready")

    def _check_refusals(self) -> None:
        """A peer that refused this region's daemon will refuse it again until somebody acts."""
        for peer, link in self.attachment.links.items():
            if link.get("state") == "refused":
                raise self._error("mismatch", f"the link to region {peer}: {link.get('reason')}")

    def _announce(self, identity: dict[str, Any]) -> None:
        """Say that this region is ready for a run of just these incarnations.

        One that is still in an older run does not say so of the new incarnations it sees.
        """
        identity["sees"] = self._incarnations()
        self.attachment.ready(identity)

    def _incarnations(self) -> list[int]:
        board = self.attachment.board()
        return [board[name].incarnation for name in self._names]

    def _all_ready(self) -> bool:
        board = self.attachment.board()
        return all(self._is_ready(board.get(name)) for name in self._names)

    def _is_ready(self, entry: Presence | None) -> bool:
        if entry is None or entry.state != "ready" or entry.identity is None:
            return False
        if entry.identity.get("sees") != self._incarnations():
            return False
        count = entry.identity.get("pipeline")
        return isinstance(count, int) and count >= self._count

    def _missing(self) -> str:
        board = self.attachment.board()
        texts = []
        for name in self._names:
            entry = board.get(name)
            if self._is_ready(entry):
                continue
            if entry is None or entry.state == "absent":
                texts.append(f"region {name} (no process attached, or no link to it)")
            else:
                state = "not ready yet" if entry.state in ("attached", "ready") else entry.state
                texts.append(f"region {name} ({state}{f': {entry.note}' if entry.note else ''})")
        return ", ".join(texts)

    def _compare(self, own: dict[str, Any]) -> None:
        board = self.attachment.board()
        for name in self._names:
            identity = board[name].identity or {}
            if identity.get("torch") != own["torch"]:
                raise self._error(
                    "mismatch",
                    f"region {name} runs torch {identity.get('torch')}, region "
                    f"{self._names[self._index]} torch {own['torch']}; install the same everywhere",
                )
            same_turn = identity.get("pipeline") == own["pipeline"]
            if same_turn and identity.get("fingerprint") != own["fingerprint"]:
                raise self._error(
                    "mismatch",
                    f"region {name} built model {identity.get('fingerprint')}, region "
                    f"{self._names[self._index]} model {own['fingerprint']}; all regions must "
                    f"build the same model",
                )

    def _open_view(self) -> None:
        board = self.attachment.board()
        self._view = {name: board[name].incarnation for name in self._names}
        rings = {
            stream: board[neighbour].rings[stream] for stream, neighbour in self._out_streams()
        }
        self.attachment.open_view(self.view, rings)

    # ---- watching

    def wait(
        self, ready: Callable[[], bool], *, timeout_s: float, needs: Sequence[str] = ()
    ) -> None:
        """Wait for `ready()` or the deadline. Raises RegionError when the run cannot go on.

        Args:
            needs: Regions that must not have left, even in order. A region leaves only once its
                neighbours have taken all it sent, so who waits for one that has left waits in
                vain; what a region further away had to say has long been passed on.
        """

        def woken() -> bool:
            return ready() or self._trouble(needs) is not None

        try:
            self.attachment.wait(woken, timeout_s=timeout_s)
        except AttachError as exc:
            raise self._error("daemon", str(exc)) from exc
        trouble = self._trouble(needs)
        if trouble is not None:
            raise trouble

    def _trouble(self, needs: Sequence[str]) -> RegionError | None:
        """What ended another region of this run, if anything did."""
        board = self.attachment.board()
        entries = [(name, board[name]) for name in self._names if name in board]
        concerned = [(name, entry) for name, entry in entries if self._concerns(name, entry)]
        # The cause before its consequences: regions leave because another one failed.
        for name, entry in concerned:
            if entry.state == "failed":
                return RegionError.from_record(entry.error or {"region": name, "kind": "lost"})
        for name, entry in entries:
            if self._view.get(name, entry.incarnation) != entry.incarnation:
                return _restarted(name, entry)
        for name, entry in concerned:
            if entry.state == "left" and name in needs:
                return self._left(name, entry.note or "no reason given")
        return None

    def _left(self, name: str, note: str) -> RegionError:
        own = self._names[self._index]
        remedy = "all regions must run the same loop"
        if note == "interrupted":
            remedy = "start all regions again, and resume from the last checkpoint"
        detail = f"left the run ({note}) while region {own} went on; {remedy}"
        return RegionError(region=name, kind="left", detail=detail)

    def _concerns(self, name: str, entry: Presence) -> bool:
        """Whether an entry is of this run, and not of how an earlier one ended."""
        if entry.state in ("attached", "ready"):
            self._seen_alive.add((name, entry.incarnation))
        if name in self._view:
            return self._view[name] == entry.incarnation
        if entry.identity is not None:
            # It said whose run it was ready for; being ready may have been over before we looked.
            sees = entry.identity.get("sees")
            return isinstance(sees, list) and self.attachment.incarnation in sees
        return (name, entry.incarnation) in self._seen_alive

    def _error(self, kind: str, detail: str) -> RegionError:
        error = RegionError(region=self._names[self._index], kind=kind, detail=detail)
        if not self._view:
            self.post_error(error)
        return error

    def explain(self, regions: Sequence[str]) -> str:
        """What is known of why nothing comes from these regions, or nothing."""
        board, links = self.attachment.board(), self.attachment.links
        if self.attachment.outage:
            return self.attachment.outage
        texts = []
        for name in regions:
            link = links.get(name, {})
            if link.get("state", "connected") != "connected":
                reason = link.get("reason") or "no reason known"
                texts.append(f"the link to region {name} is {link['state']} ({reason})")
            elif board[name].note:
                texts.append(f"region {name}: {board[name].note}")
        return "; ".join(texts)

    # ---- saying

    def post_action(self, text: str) -> None:
        """Publish what this rank is doing."""
        self.attachment.action = text

    def post_error(self, error: RegionError) -> None:
        """Tell every region of an error that happened here."""
        self._failed = True
        self.attachment.fail(error.to_record())

    def post_report(self, result: StepResult) -> None:
        """Publish a finished step for the status page."""
        self.attachment.report(
            {
                "step": result.step,
                "num_tokens": result.num_tokens,
                "loss": result.loss,
                "step_s": result.step_s,
                "num_microbatches": result.num_microbatches,
                "memory_bytes": dict(result.memory_bytes),
                "attribution_s": dict(result.attribution_s),
                "regions_s": {name: dict(spent) for name, spent in result.regions_s.items()},
                "verdicts": [verdict.to_record() for verdict in result.verdicts],
            }
        )

    def leave(self) -> None:
        """Go in order: what the neighbours still wait for is taken before they hear of it."""
        if self._view and not self._failed and self._trouble(()) is None:
            self.post_action("waiting for the neighbours to take the last messages")
            try:
                self._await_taken()
            except AttachError as exc:
                logger.info("= %s", exc)
        self.attachment.leave("the process is done")
        self.attachment.close()

    def _await_taken(self) -> None:
        """Wait until all is taken: shortly, but up to wait_s while the way there is cut."""
        now = time.monotonic()
        give_up, last = now + _LEAVE_TIMEOUT_S, now + self._config.site.liveness.wait_s
        while not self.attachment.wait(self._all_taken, timeout_s=_LEAVE_LOOK_S):
            now = time.monotonic()
            why = self.explain([neighbour for _, neighbour in self._out_streams()])
            if why:
                give_up = now + _LEAVE_TIMEOUT_S
            if now >= min(give_up, last):
                logger.warning(
                    "! left although the neighbours have not taken all%s", f": {why}" if why else ""
                )
                return

    def _all_taken(self) -> bool:
        board = self.attachment.board()
        for stream, neighbour in self._out_streams():
            # One that has ended takes nothing any more, and waits for nothing.
            present = board[neighbour].state in ("attached", "ready")
            if present and self.attachment.out(stream).unacknowledged:
                return False
        return True

    def _out_streams(self) -> list[tuple[int, str]]:
        """Streams that this region sends on, each with the neighbour that takes it."""
        streams = []
        if self._index > 0:
            streams.append((stream_id(self._index - 1, BACKWARD), self._names[self._index - 1]))
        if self._index < len(self._names) - 1:
            streams.append((stream_id(self._index, FORWARD), self._names[self._index + 1]))
        return streams


def _restarted(name: str, entry: Presence) -> RegionError:
    """Names the region that was started again, not the one that saw it."""
    who = "daemon" if entry.state == "absent" else "training process"
    return RegionError(
        region=name,
        kind="restarted",
        detail=f"its {who} was started again in the middle of the run; start all regions again, "
        "and resume from the last checkpoint",
    )
