"""`python -m geotrain`, the same as the command `geotrain`."""

import sys

from geotrain.cli import main

sys.exit(main())
