"""Which seeds a run tries: the usual number, or as the environment says."""

from __future__ import annotations

import os

CHUNKS = 10


def replay(seed: int) -> str:
    """Return the environment in which a seed has the same history again: sets have an order of their own."""
    return f"PYTHONHASHSEED={os.environ.get('PYTHONHASHSEED', '<as it was>')} TIERINGD_SEED={seed}"


def seeds_of(chunk: int, *, usual: int, share: float) -> range:
    """
    Return the seeds of one of the chunks of a world that has *usual* seeds.

    `TIERINGD_SEEDS` is the number of all worlds together, of which this one gets its *share*;
    `TIERINGD_SEED` names a single one.
    """
    one = os.environ.get("TIERINGD_SEED")
    if one is not None:
        return range(int(one), int(one) + 1) if chunk == 0 else range(0)
    count = os.environ.get("TIERINGD_SEEDS")
    total = usual if count is None else max(1, round(int(count) * share))
    return range(chunk * total // CHUNKS, (chunk + 1) * total // CHUNKS)
