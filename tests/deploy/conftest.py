"""The tests in this folder import its helper modules by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
