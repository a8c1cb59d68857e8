"""What was changed, and why."""

from geotrain.lab.history import History


def test_the_last_changes_are_kept_oldest_first():
    history = History()
    for number in range(150):
        history.add("every link", {"loss": number}, why="test", now=float(number))
    events = history.events()
    assert len(events) == 100
    assert events[-1] == {
        "at": 149.0,
        "links": "every link",
        "settings": {"loss": 149},
        "why": "test",
    }
