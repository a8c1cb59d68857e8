"""The scripts in this folder run on their own, so they and the tests import siblings by name."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As pytest's, without the test's name: sockets lie below, and their paths must be short."""
    return tmp_path_factory.mktemp("t")
