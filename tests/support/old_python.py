"""A flag that is true on Python whose timeouts tieringd mends when it is imported."""

import sys

MENDS_TIMEOUTS = sys.version_info < (3, 11, 3)
"""Each process that imports tieringd runs `tieringd/timeouts.py` then."""
