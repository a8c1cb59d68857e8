"""For all tests, of which two run at a time: long ones first, and no clock but the deadlines."""

import hypothesis
import pytest

# An example takes as long as the other core's test lets it.
hypothesis.settings.register_profile("shared machine", deadline=None, derandomize=True)
hypothesis.settings.load_profile("shared machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # What starts regions takes minutes, the rest seconds: begun last, it would run on alone.
    items.sort(key=lambda item: "integration" not in item.path.parts)
