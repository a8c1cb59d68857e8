"""What is off in a run, by name: a stage, a link, the loader, a process that stood still.

Every region comes to the same verdicts, from the same votes. A long microbatch is no slow stage,
and a large tensor no slow link: each is compared with what its own work took before.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from geotrain.control.baseline import Watch
from geotrain.control.joints import Joint
from geotrain.control.split import propose
from geotrain.control.timings import Timings
from geotrain.control.watched import StageWatch, WayWatch
from geotrain.pipeline.simulate import Boundary, Direction, PipelineModel, StageTimes

SHARE = 0.1
"""Of a step, from which on the loader or the user's code is worth a word."""
LEAST_SHARE_S = 0.02
STALLED_S = 1.0
"""A process that did not run for this long stood still."""
WARM_UP_STEPS = 2
RESPLIT_STEPS = 10
"""A stage that is slow for so long is slow to stay."""

Kind = Literal[
    "compute", "coding", "link", "receiver", "sender", "region links", "loader", "user_code",
    "stopped",
]  # fmt: skip
Way = tuple[int, int]
"""Sender and receiver, neighbours in the line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One thing that is off. Prints as a line of text."""

    kind: Kind
    where: str
    """A region, or "virginia -> frankfurt"."""
    since: int
    """The step from which on it was so."""
    text: str
    """Such as "compute in frankfurt 1.5x its own since step 812"."""
    remedy: str = ""

    def to_record(self) -> dict[str, str]:
        """For status pages and reports."""
        return {"kind": self.kind, "where": self.where, "text": str(self)}

    def __str__(self) -> str:
        return f"{self.text}; {self.remedy}" if self.remedy else self.text


class Verdicts:
    """Follows a run step by step.

    Args:
        names: The regions in order.
        layers: How many layers each has, for the split that is proposed.
    """

    def __init__(self, names: Sequence[str], *, layers: Sequence[int]) -> None:
        self._names = names
        self._layers = layers
        self._stages = [StageWatch() for _ in names]
        self._ways: dict[Way, WayWatch] = {}
        for index in range(len(names) - 1):
            self._ways[index, index + 1] = WayWatch()
            self._ways[index + 1, index] = WayWatch()
        self._shares = {(kind, name): Watch() for kind in _SHARES for name in names}
        self._num_steps = 0
        self._told: dict[tuple[Kind, str], Verdict] = {}
        self._remedies: dict[str, str] = {}

    @property
    def now(self) -> tuple[Verdict, ...]:
        """What is off as of the last step."""
        return tuple(self._told.values())

    def on_step(
        self,
        step: int,
        timings: Sequence[Timings],
        joints: Sequence[Joint],
        spent_s: Mapping[str, Mapping[str, float]],
    ) -> list[str]:
        """Take in one step.

        Args:
            step: Its number.
            timings, joints: One of each region and boundary, in order.
            spent_s: Where each region's previous step went, as far as known.

        Returns:
            Lines for the log: what began to be off with this step, and what is over.
        """
        if not all(own.forward for own in timings):
            return []  # a skipped step, of which there is nothing to know
        self._num_steps += 1
        stalls = dict(self._stalls(step, timings))
        if not stalls and self._num_steps > WARM_UP_STEPS:
            self._watch(step, timings, joints, spent_s)
        found = stalls | {(each.kind, each.where): each for each in self._found()}
        self._add_remedies(step, found, timings, joints)
        lines = [
            f"step {step}: {verdict}" for key, verdict in found.items() if key not in self._told
        ]
        for key, before in self._told.items():
            if key not in found:
                # That a process stood still in one step is over with it; nobody need be told.
                lines += [f"step {step}: over: {before.text}"] if before.kind != "stopped" else []
            elif found[key].remedy and not before.remedy:
                lines.append(f"step {step}: {found[key]}")
        self._told = found
        return lines

    # ---- looking

    def _stalls(
        self, step: int, timings: Sequence[Timings]
    ) -> Iterator[tuple[tuple[Kind, str], Verdict]]:
        for name, stage, own in zip(self._names, self._stages, timings, strict=True):
            stalled_s = max(own.stalled_us / 1e6, stage.longest_excess_s(own))
            if stalled_s >= STALLED_S:
                text = (
                    f"{name} stood still for {stalled_s:.1f} s in step {step} (its process was "
                    f"stopped, swapped out, or got no processor)"
                )
                yield ("stopped", name), Verdict(kind="stopped", where=name, since=step, text=text)

    def _watch(
        self,
        step: int,
        timings: Sequence[Timings],
        joints: Sequence[Joint],
        spent_s: Mapping[str, Mapping[str, float]],
    ) -> None:
        for stage, own in zip(self._stages, timings, strict=True):
            stage.take_in(step, own)
        slowest_s = max(stage.microbatch_s for stage in self._stages)
        for index, joint in enumerate(joints):
            there, back = self._ways[index, index + 1], self._ways[index + 1, index]
            there.take_in(step, joint.down, other=back, microbatch_s=slowest_s)
            back.take_in(step, joint.up, other=there, microbatch_s=slowest_s)
        for name, spent in spent_s.items():
            step_s = sum(spent.values())
            for kind in _SHARES:
                if kind == "loader" and name != self._names[0]:
                    continue  # it waits for the first region's
                share = spent[kind] / step_s if spent[kind] >= LEAST_SHARE_S else 0.0
                self._shares[kind, name].take_in(step - 1, share, limit=SHARE)

    # ---- naming

    def _found(self) -> Iterator[Verdict]:
        for name, stage in zip(self._names, self._stages, strict=True):
            since = stage.watch.since
            if since is not None:
                what: Kind = "coding" if stage.is_coding else "compute"
                words = "copying and coding" if stage.is_coding else "compute"
                text = f"{words} in {name} {stage.factor:.1f}x its own since step {since}"
                yield Verdict(kind=what, where=name, since=since, text=text)
        yield from self._slow_links()
        for (kind, name), watch in self._shares.items():
            if watch.since is not None:
                words = {"loader": "loader", "user_code": "user code"}[kind]
                text = f"{words} in {name} {watch.middle:.0%} of a step since step {watch.since}"
                yield Verdict(kind=kind, where=name, since=watch.since, text=text)

    def _slow_links(self) -> Iterator[Verdict]:
        """Links that are slow; one region's in common where all its links are, and two or more."""
        slow = {way: each for way, each in self._ways.items() if each.watch.since is not None}
        told: set[Way] = set()
        for index, name in enumerate(self._names):
            coming = [way for way in self._ways if way[1] == index]
            going = [way for way in self._ways if way[0] == index]
            if len(coming) < 2:
                continue
            kinds: dict[tuple[bool, bool], tuple[Kind, str, list[Way]]] = {
                (True, False): ("receiver", f"all that comes to {name}", coming),
                (False, True): ("sender", f"all that {name} sends", going),
                (True, True): ("region links", f"every link of {name}", coming + going),
            }
            key = all(way in slow for way in coming), all(way in slow for way in going)
            if key in kinds and not told.intersection(kinds[key][2]):
                kind, words, ways = kinds[key]
                told.update(ways)
                yield _slow([slow[way] for way in ways], kind, name, words)
        for way, each in slow.items():
            if way not in told:
                where = f"{self._names[way[0]]} -> {self._names[way[1]]}"
                yield _slow([each], "link", where, f"link {where}")

    def _add_remedies(
        self,
        step: int,
        found: dict[tuple[Kind, str], Verdict],
        timings: Sequence[Timings],
        joints: Sequence[Joint],
    ) -> None:
        """For a stage that is slow to stay, once: another split of the layers."""
        for (kind, name), verdict in found.items():
            if kind != "compute":
                continue
            known = self._told.get((kind, name))
            if known is not None and known.since == verdict.since and name in self._remedies:
                remedy = self._remedies[name]
            elif step - verdict.since >= RESPLIT_STEPS:
                remedy = self._remedies[name] = self._resplit(timings, joints)
            else:
                remedy = ""
                self._remedies.pop(name, None)
            found[kind, name] = Verdict(
                kind=kind, where=name, since=verdict.since, text=verdict.text, remedy=remedy
            )

    def _resplit(self, timings: Sequence[Timings], joints: Sequence[Joint]) -> str:
        stages = [
            StageTimes(
                forward_s=[run.length_us / 1e6 for run in own.forward],
                backward_s=[run.length_us / 1e6 for run in own.backward] or [0.0],
            )
            for own in timings
        ]
        ways = []
        for joint in joints:
            mean_bytes = statistics.mean([each.size_bytes for each in joint.down] or [0])
            transfer_s = joint.s_per_byte * mean_bytes
            ways.append(Direction(latency_s=joint.latency_s, transfer_s=transfer_s))
        count = len(timings[0].forward)
        better = propose(
            PipelineModel(
                stages=stages, boundaries=[Boundary(forward=way, backward=way) for way in ways]
            ),
            self._layers,
            num_microbatches=count,
            # As wide as can be: the windows would be chosen anew.
            windows=[count] * len(stages),
        )
        return better.text(self._names, self._layers) if better is not None else ""


_SHARES: tuple[Literal["loader", "user_code"], ...] = ("loader", "user_code")


def _slow(ways: Sequence[WayWatch], kind: Kind, where: str, words: str) -> Verdict:
    since = max(each.watch.since for each in ways if each.watch.since is not None)
    factor = max(each.factor for each in ways)
    text = f"{words} {factor:.1f}x its median since step {since}"
    return Verdict(kind=kind, where=where, since=since, text=text)
