"""
The number of examples that Hypothesis tries: usual, many more in `make nightly`, and fewer in `make quick`.

The examples of a test are the same in each run, so that a change is judged by what it changes. The nightly
run has others each time: it is there to find what is wrong.

`TIERINGD_PROFILE=nightly` chooses a profile; tests/conftest.py loads it. A test that needs a
number of its own writes `max_examples=examples(300)`, so that the profile multiplies that too.
"""

from __future__ import annotations

import os
from typing import Final

from hypothesis import HealthCheck, settings

NIGHTLY: Final = "nightly"
FACTORS: Final = {"tieringd": 1, NIGHTLY: 20, "quick": 0.1}
"""By profile, the factor for the usual number."""
USUAL_EXAMPLES: Final = 100
PROFILE: Final = os.environ.get("TIERINGD_PROFILE", "tieringd")


def examples(count: int) -> int:
    """Return the number of examples for *count* in this run's profile."""
    return max(1, int(count * FACTORS[PROFILE]))


def load_profile() -> None:
    """
    Make the chosen profile the default of all tests.

    Raises:
        ValueError: The environment names an unknown profile.
    """
    if PROFILE not in FACTORS:
        raise ValueError(f"TIERINGD_PROFILE is {PROFILE!r}; there are {', '.join(FACTORS)}")
    # There is no deadline: the time of an example depends on the machine, and a busy one must not fail tests.
    settings.register_profile(
        PROFILE,
        max_examples=examples(USUAL_EXAMPLES),
        deadline=None,
        derandomize=PROFILE != NIGHTLY,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile(PROFILE)
