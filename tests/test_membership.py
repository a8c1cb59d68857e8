"""What a rank makes of the board and of its links, without a daemon."""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch

from geotrain.config import load_config
from geotrain.errors import RegionError
from geotrain.membership import Membership
from geotrain.pipeline.segment import SegmentInfo
from geotrain.transport.messages import Presence
from tests.daemon.daemons import Daemons
from tests.transport.local_line import TIMEOUT_S

INFO = SegmentInfo(fingerprint="abc", parameter_index={}, layer_names=())
CONFIG = """
version = 1
[run]
id = "t"
global_batch = 8
[[run.regions]]
name = "virginia"
layers = "0:1"
[[run.regions]]
name = "frankfurt"
layers = "1:2"
[site]
name = "virginia"
"""


@dataclass
class FakeAttachment:
    """Answers from what a test put there; nothing ever arrives by itself."""

    entries: dict[str, Presence]
    links: dict[str, dict[str, str]] = field(default_factory=dict)
    incarnation: int = 1
    outage: str = ""
    action: str = ""
    failed: list[dict] = field(default_factory=list)

    def board(self):
        return dict(self.entries)

    def ready(self, identity):
        entry = Presence(region="virginia", incarnation=1, state="ready", identity=identity)
        self.entries["virginia"] = entry

    def open_view(self, view, rings):
        self.view, self.rings = view, rings

    def fail(self, error):
        self.failed.append(error)

    def wait(self, ready, *, timeout_s):
        assert ready(), "nothing more will come"
        return True


def membership(tmp_path, **changes):
    path = tmp_path / "site.toml"
    path.write_text(CONFIG)
    entries = {
        "virginia": Presence(region="virginia", incarnation=1, state="attached"),
        "frankfurt": Presence(region="frankfurt", incarnation=2, state="attached"),
    }
    attachment = FakeAttachment(entries, **changes)
    return Membership(load_config(path), attachment), attachment


def test_a_refused_link_ends_the_wait_at_once_with_the_reason(tmp_path):
    reason = "run.seed is 1 in virginia, 2 in frankfurt"
    refused = {"frankfurt": {"state": "refused", "reason": reason}}
    member, attachment = membership(tmp_path, links=refused)
    with pytest.raises(RegionError, match=r"link to region frankfurt: run\.seed is 1") as caught:
        member.assemble(INFO)
    assert caught.value.kind == "mismatch"
    assert attachment.failed == [caught.value.to_record()]


def test_a_link_that_is_refused_already_ends_attaching_and_leaves_the_place_free(tmp_path):
    with contextlib.closing(Daemons(tmp_path, 2, site="arena_mib = 8")) as running:
        other = running.config_path("b")
        other.write_text(other.read_text().replace("global_batch = 8", "global_batch = 16"))
        for name in running.names:
            running.start(name)
        for name, peer in (("a", "b"), ("b", "a")):
            running.wait_for(name, lambda s, peer=peer: s["links"][peer]["state"] == "refused")
            config = load_config(running.config_path(name))
            for _ in range(2):
                with pytest.raises(RegionError, match=r"run\.global_batch is ") as caught:
                    Membership.join(config, timeout_s=TIMEOUT_S)
                assert (caught.value.region, caught.value.kind) == (name, "mismatch")
            running.wait_for(name, lambda s: s["state"] == "failed" and not s["ranks"])


@pytest.mark.parametrize(
    ("note", "remedy"),
    [("the process is done", "run the same loop"), ("interrupted", "resume from the last")],
)
def test_a_region_that_left_while_it_was_needed_is_named_with_the_remedy(tmp_path, note, remedy):
    member, attachment = membership(tmp_path)
    assert member._trouble(["frankfurt"]) is None
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt", incarnation=2, revision=1, state="left", note=note
    )
    with pytest.raises(RegionError, match=f"frankfurt: left the run .*{remedy}"):
        member.wait(lambda: False, timeout_s=1.0, needs=["frankfurt"])
    member.wait(lambda: True, timeout_s=1.0)  # whom nobody waits for may go


def test_the_cause_is_told_before_its_consequences(tmp_path):
    member, attachment = membership(tmp_path)
    member._trouble(())
    error = RegionError(region="frankfurt", kind="exception", detail="no such expert")
    attachment.entries["virginia"] = Presence(
        region="virginia", incarnation=1, revision=1, state="left", note="after an error"
    )
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt", incarnation=2, revision=1, state="failed", error=error.to_record()
    )
    with pytest.raises(RegionError, match="no such expert"):
        member.wait(lambda: False, timeout_s=1.0, needs=["virginia", "frankfurt"])


@pytest.mark.parametrize(
    ("state", "who"),
    [("absent", "daemon"), ("attached", "training process"), ("ready", "training process")],
)
def test_a_region_that_was_started_again_is_named_by_whoever_sees_it(tmp_path, state, who):
    member, attachment = membership(tmp_path)
    identity = {"fingerprint": "abc", "torch": torch.__version__.split("+")[0]}
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt",
        incarnation=2,
        state="ready",
        identity={**identity, "pipeline": 1, "sees": [1, 2]},
        rings={0: 4096},
    )
    member.assemble(INFO)
    member.wait(lambda: True, timeout_s=1.0)
    attachment.entries["frankfurt"] = Presence(region="frankfurt", incarnation=3, state=state)
    with pytest.raises(RegionError, match=f"region frankfurt: its {who} was started again") as got:
        member.wait(lambda: False, timeout_s=1.0)
    assert (got.value.region, got.value.kind) == ("frankfurt", "restarted")


def test_how_an_earlier_run_ended_does_not_concern_this_one(tmp_path):
    member, attachment = membership(tmp_path)
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt", incarnation=2, state="failed", error={"region": "frankfurt"}
    )
    member.wait(lambda: True, timeout_s=1.0, needs=["frankfurt"])


@pytest.mark.parametrize("state", ["failed", "left"])
@pytest.mark.parametrize(("sees", "concerns"), [([1, 2], True), ([0, 2], False), (None, False)])
def test_whoever_was_ready_for_this_run_and_ended_before_we_looked_concerns_it(
    tmp_path, state, sees, concerns
):
    """The board holds states: one that lasted shortly may never be seen."""
    member, attachment = membership(tmp_path)
    error = RegionError(region="frankfurt", kind="mismatch", detail="another model")
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt",
        incarnation=2,
        state=state,
        identity={"fingerprint": "abd", "sees": sees},
        error=error.to_record() if state == "failed" else None,
    )
    found = member._trouble(["frankfurt"])
    assert (found is not None) == concerns
    if found is not None:
        assert (found.region, found.kind) == (
            "frankfurt",
            "mismatch" if state == "failed" else state,
        )


def test_a_wait_can_be_explained(tmp_path):
    down = {"frankfurt": {"state": "down", "reason": "connection refused"}}
    member, attachment = membership(tmp_path, links=down)
    assert "link to region frankfurt is down (connection refused)" in member.explain(["frankfurt"])
    attachment.links = {}
    attachment.entries["frankfurt"] = Presence(
        region="frankfurt", incarnation=2, state="ready", note="silent for 12 s"
    )
    assert member.explain(["frankfurt"]) == "region frankfurt: silent for 12 s"


class Clock:
    """Time passes only while somebody waits."""

    def __init__(self, monkeypatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("geotrain.membership.time.monotonic", lambda: self.now)


class Slow(FakeAttachment):
    """What it sent is never taken; `until` says when the way there is mended."""

    unacknowledged = 1

    def out(self, stream):
        return self

    def wait(self, ready, *, timeout_s):
        self.clock.now += timeout_s
        if self.clock.now >= self.until:
            self.outage = ""
            self.unacknowledged = 0 if self.is_taken_then else 1
        return ready()

    def leave(self, reason):
        self.left_at = self.clock.now

    def close(self):
        pass


@pytest.mark.parametrize(
    ("outage", "until_s", "is_taken_then", "left_after_s"),
    [
        ("", 3.0, True, 3.0),
        ("", 1e9, False, 10.0),
        ("the daemon is gone", 14.0, True, 14.0),
        ("the daemon is gone", 14.0, False, 23.5),
        ("the daemon is gone", 1e9, False, 1800.0),
    ],
)
def test_a_rank_that_leaves_waits_for_the_way_to_be_mended(
    tmp_path, monkeypatch, outage, until_s, is_taken_then, left_after_s
):
    here, _ = membership(tmp_path)
    ready = {name: Presence(region=name, state="ready") for name in ("virginia", "frankfurt")}
    attachment = Slow(ready, outage=outage)
    attachment.clock = Clock(monkeypatch)
    attachment.until = attachment.clock.now + until_s
    attachment.is_taken_then = is_taken_then
    here.attachment, here._view = attachment, {"virginia": 0, "frankfurt": 0}
    began = attachment.clock.now
    here.leave()
    assert attachment.left_at - began == left_after_s
