"""When a rank counts as silent, and when as stuck."""

import pytest

from geotrain.daemon.liveness import RankLiveness


def make_liveness(*, step: int = 3) -> RankLiveness:
    liveness = RankLiveness(silent_s=10.0, now=0.0)
    liveness.on_beat(action="1F3", age_s=0.0, step=step, now=0.0)
    return liveness


def test_silence_is_named_after_the_limit_and_again_at_each_doubling() -> None:
    liveness = make_liveness()
    notes = [liveness.note(now) for now in (0.0, 9.9, 10.0, 19.9, 20.0, 39.0, 40.0)]
    assert notes == [
        "",
        "",
        "silent for 10 s in 1F3",
        "silent for 10 s in 1F3",
        "silent for 20 s in 1F3",
        "silent for 20 s in 1F3",
        "silent for 40 s in 1F3",
    ]


def test_a_beat_ends_the_silence() -> None:
    liveness = make_liveness()
    assert liveness.note(15.0) != ""
    liveness.on_beat(action="1B3", age_s=0.1, step=3, now=16.0)
    assert liveness.note(17.0) == ""


def test_one_action_for_too_long_is_named_although_beats_flow() -> None:
    liveness = make_liveness()
    for now in range(1, 25):
        liveness.on_beat(action="1F3", age_s=float(now), step=3, now=float(now))
    assert liveness.note(24.0) == "no progress for 20 s in 1F3"


def test_an_action_that_usually_takes_long_has_ten_times_that() -> None:
    liveness = make_liveness()
    liveness.on_beat(action="1F3", age_s=4.0, step=3, now=4.0)
    liveness.on_beat(action="1F4", age_s=0.0, step=3, now=5.0)
    liveness.on_beat(action="1F4", age_s=39.0, step=3, now=44.0)
    assert liveness.note(44.0) == ""
    liveness.on_beat(action="1F4", age_s=40.0, step=3, now=45.0)
    assert liveness.note(45.0) == "no progress for 40 s in 1F4"


@pytest.mark.parametrize(
    "action", ["in user code", "waiting for forward 3", "compiling", "loading"]
)
def test_waiting_and_user_code_may_take_any_time(action: str) -> None:
    liveness = make_liveness()
    liveness.on_beat(action=action, age_s=500.0, step=3, now=1.0)
    assert liveness.note(2.0) == ""
    assert liveness.note(12.0) == f"silent for 10 s in {action.removeprefix('in ')}"


def test_before_the_first_finished_step_only_silence_counts() -> None:
    liveness = make_liveness(step=-1)
    liveness.on_beat(action="0F0", age_s=300.0, step=-1, now=1.0)
    assert liveness.note(2.0) == ""
    assert liveness.note(11.0) == "silent for 10 s in 0F0"


def test_the_age_of_an_action_grows_between_beats() -> None:
    liveness = make_liveness()
    liveness.on_beat(action="1F3", age_s=2.0, step=3, now=5.0)
    assert liveness.action_age_s(6.5) == 3.5
