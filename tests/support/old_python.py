"""Python before 3.11.3, whose timeouts tieringd mends: tests know it by this flag."""

import sys

MENDS_TIMEOUTS = sys.version_info < (3, 11, 3)
"""Each process that imports tieringd runs `tieringd/timeouts.py` then."""
