"""What can be read from a trace."""

import pytest

from geotrain.pipeline.schedule import Action
from geotrain.pipeline.trace import TracedAction, busy_s, most_in_flight


def trace_of(text: str) -> list[TracedAction]:
    """Actions of half a second each, one after another with half a second between them."""
    actions = [Action.parse(f"0{word}") for word in text.split()]
    return [
        TracedAction(kind=a.kind, microbatch=a.microbatch, begin_s=at, end_s=at + 0.5)
        for at, a in enumerate(actions)
    ]


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("", 0),
        ("F0 B0 F1 B1", 1),
        ("F0 F1 B0 F2 B1 B2", 2),
        ("F0 F1 F2 B0 B1 B2", 3),
        ("F0 F1 F2", 0),  # nothing here trains: no backward comes
        ("F0 F1 F2 B1", 1),
    ],
)
def test_in_flight_counts_forwards_whose_backward_is_due(text, most):
    assert most_in_flight(trace_of(text)) == most


def test_busy_is_the_time_in_actions_alone():
    assert busy_s(trace_of("F0 F1 B0")) == 1.5
    assert busy_s([]) == 0
