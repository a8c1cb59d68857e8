"""What changed, and why."""

import pytest

from geotrain.lab.demo.changes import ChangeLog
from geotrain.lab.demo.options import Options
from geotrain.lab.settings import LinkSettings, describe_settings
from tests.lab.demo.running import link_record, step_line

OPTIONS = Options()
NAMES = OPTIONS.names


def step(number, **changes):
    return step_line(0, number, options=OPTIONS, **changes)


def link_told(log, now, **changes):
    log.on_link(*NAMES, link_record(**changes), now=now)
    return [(change.at_s, str(change)) for change in log.take()]


def test_a_link_that_goes_and_comes_is_told_with_the_daemons_reason():
    log = ChangeLog(NAMES)
    assert link_told(log, 1.0, state="down", reason="waiting for region b to dial in") == []
    assert link_told(log, 2.0) == []  # that it is made at the start is no change
    assert link_told(log, 9.0, state="down", reason="ping timeout", since_s=1.5) == [
        (7.5, "link virginia - frankfurt is down (ping timeout)")
    ]
    assert link_told(log, 10.0, state="down", reason="connection refused") == []
    assert link_told(log, 12.0, lanes_opened=2, since_s=0.5) == [
        (11.5, "link virginia - frankfurt is back")
    ]


def test_a_link_that_was_lost_and_back_between_two_looks_is_told():
    log = ChangeLog(NAMES)
    assert link_told(log, 1.0) == []
    assert link_told(log, 5.0, lanes_opened=3, since_s=0.25) == [
        (4.75, "link virginia - frankfurt was lost and is back")
    ]
    assert link_told(log, 6.0, lanes_opened=3, since_s=1.25) == []


def test_each_event_of_the_lab_is_told_once_with_its_reason():
    log = ChangeLog(NAMES)
    first = {"at": 3.0, "links": "every link", "settings": {"rtt_s": 0.25}, "why": "a detour"}
    second = {"at": 3.0, "links": "a to b", "settings": {"cut": True}, "why": "script"}
    log.on_events([first])
    log.on_events([first, second])
    log.on_events([second])  # the lab forgets its oldest
    told = [str(change) for change in log.take()]
    assert told == ["every link: round trip 250 ms (a detour)", "a to b: cut"]
    assert log.take() == []
    assert len(log.all) == 2


def test_changes_of_the_plan_and_skipped_steps_are_told():
    log = ChangeLog(NAMES)
    log.on_step(step(1))
    log.on_step(step(2))
    assert log.take() == []
    log.on_step(step(3, windows=[12, 1], num_microbatches=16))
    log.on_step(step(4, windows=[12, 1], num_microbatches=16, committed=False, reason="NaN in b"))
    assert [(change.at_s, str(change)) for change in log.take()] == [
        (3.0, "windows 8,1 -> 12,1 from step 3 on"),
        (3.0, "microbatches 4 -> 16 from step 3 on"),
        (4.0, "step 4 skipped in every region (NaN in b)"),
    ]


def test_only_the_last_are_kept_and_taken():
    log = ChangeLog(NAMES)
    for number in range(300):
        log.on_events([{"at": number, "links": "x", "settings": {"loss": 0.0}, "why": "script"}])
    assert [change.at_s for change in log.all] == list(range(100, 300))
    assert [change.at_s for change in log.take()] == list(range(100, 300))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"rtt_s": 0.25, "loss": 0.001}, "round trip 250 ms, loss 0.1 %"),
        ({"delay_s": 0.05}, "delay 50 ms"),
        ({"rate_bytes_per_s": 12.5e6}, "100 Mbit/s"),
        ({"rate_bytes_per_s": None}, "any rate"),
        ({"jitter_s": 0.002, "queue_s": 0.2}, "jitter 2 ms, queue 200 ms"),
        ({"queue_bytes": 65536}, "queue 64 KiB"),
        ({"idle_drop_s": 30.0}, "forgets after 30 s of silence"),
        ({"cut": False}, "mended"),
    ],
)
def test_settings_are_told_in_the_units_that_people_use(settings, text):
    assert describe_settings(settings) == text


def test_every_setting_of_a_link_can_be_told():
    for name, value in LinkSettings().as_dict().items():
        assert describe_settings({name: value})


def test_what_is_off_is_told_once_when_it_begins_and_once_when_it_is_over():
    log = ChangeLog(NAMES)
    slow = {"kind": "compute", "where": "frankfurt", "text": "compute 1.5x since step 2"}
    slower = slow | {"text": "compute 1.6x since step 2; move a layer"}
    for number, verdicts in enumerate([[], [slow], [slower], [], []], start=1):
        log.on_step(step(number, verdicts=verdicts))
    assert [(change.at_s, change.what) for change in log.take()] == [
        (2.0, "compute 1.5x since step 2"),
        (4.0, "over: compute 1.6x since step 2; move a layer"),
    ]
