import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.pipeline.schedule import Action, next_kind
from geotrain.pipeline.window import classic_windows, resolve_windows


def run_alone(num_microbatches: int, window: int) -> str:
    """A last stage: every backward is ready right after its forward."""
    forwards = backwards = 0
    last = None
    trace = []
    while backwards < num_microbatches:
        kind = next_kind(
            last=last,
            forward_ready=forwards < num_microbatches,
            backward_ready=backwards < forwards,
            in_flight=forwards - backwards,
            window=window,
        )
        assert kind is not None
        number = forwards if kind == "F" else backwards
        trace.append(str(Action(stage=1, kind=kind, microbatch=number)))
        forwards, backwards = forwards + (kind == "F"), backwards + (kind == "B")
        last = kind
    return " ".join(trace)


def test_the_last_stage_alternates():
    assert run_alone(3, window=1) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_a_wider_window_on_the_last_stage_changes_nothing():
    assert run_alone(3, window=3) == run_alone(3, window=1)


def test_both_ready_runs_the_kind_that_did_not_run_last():
    ready = {"forward_ready": True, "backward_ready": True, "in_flight": 1, "window": 4}
    assert next_kind(last="F", **ready) == "B"
    assert next_kind(last="B", **ready) == "F"
    assert next_kind(last=None, **ready) == "F"


def test_a_full_window_holds_forwards_back():
    full = {"last": "F", "forward_ready": True, "in_flight": 2, "window": 2}
    assert next_kind(backward_ready=False, **full) is None
    assert next_kind(backward_ready=True, **full) == "B"


@given(
    last=st.sampled_from([None, "F", "B"]),
    forward=st.booleans(),
    backward=st.booleans(),
    in_flight=st.integers(0, 6),
    window=st.integers(1, 6),
)
def test_the_rule_waits_only_when_nothing_may_run(last, forward, backward, in_flight, window):
    kind = next_kind(
        last=last,
        forward_ready=forward,
        backward_ready=backward,
        in_flight=in_flight,
        window=window,
    )
    admissible = forward and in_flight < window
    assert (kind is None) == (not admissible and not backward)
    if kind == "F":
        assert admissible
    if kind == "B":
        assert backward


@given(stage=st.integers(0, 99), kind=st.sampled_from("FB"), microbatch=st.integers(0, 9999))
def test_actions_print_and_parse_back(stage, kind, microbatch):
    action = Action(stage=stage, kind=kind, microbatch=microbatch)
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "0X1", "F0", "0F", "0F1 ", "-1F0", "0f1"])
def test_what_is_not_an_action_is_refused(text):
    with pytest.raises(ValueError, match="not an action"):
        Action.parse(text)


def test_classic_windows_are_those_of_1f1b():
    assert classic_windows(4) == (4, 3, 2, 1)


def test_a_single_number_leaves_the_last_stage_at_one():
    assert resolve_windows(6, num_stages=3, num_microbatches=8) == (6, 6, 1)


@given(
    window=st.one_of(
        st.just("classic"), st.integers(1, 20), st.lists(st.integers(1, 20), min_size=3, max_size=3)
    ),
    num_microbatches=st.integers(1, 12),
)
def test_windows_lie_between_one_and_the_microbatches(window, num_microbatches):
    windows = resolve_windows(window, num_stages=3, num_microbatches=num_microbatches)
    assert len(windows) == 3
    assert all(1 <= each <= num_microbatches for each in windows)
