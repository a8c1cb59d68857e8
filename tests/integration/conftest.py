"""The scripts in this folder run on their own, so they and the tests import siblings by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
