"""
Fuzz the parsers: `make fuzz MINUTES=10`.

    python -m tests.fuzz.run [--seconds 60 | --inputs 1000] [--seed 0] [--only NAME ...]

Every input gives a value or a documented error, in bounded time and memory. One that does not is written to
`tests/fuzz/corpus/NAME/`, where `tests/unit/test_fuzz.py` tries it again in each run of the tests; this run
ends with 1. The same seed gives the same inputs, as far as the time reaches. Where an input ends the process,
as a failed allocation in machine code does, `--verbose` says which parser had which inputs last.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import resource
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import Target, targets

CORPUS = Path(__file__).parent / "corpus"
_CPU_SECONDS_MAX = 2.0
"""For one input of at most a megabyte."""
_MEMORY_MAX_BYTES = 512 << 20
"""Above what the process has at its start."""
_ROUND = 50
"""Inputs of one target before the next one has its turn."""


def fault_of(target: Target, data: bytes) -> str | None:
    """Return what is wrong with how *target* takes *data*; None if it is right."""
    begun = time.process_time()
    try:
        target.parse(data)
    except target.errors:
        pass
    except Exception:  # noqa: BLE001 - any other exception is what is looked for
        return traceback.format_exc(limit=-4)
    took = time.process_time() - begun
    return f"it took {took:.1f} s" if took > _CPU_SECONDS_MAX else None


def limit_memory() -> None:
    """Let an input that asks for too much memory end in a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + _MEMORY_MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def kept_inputs(target: Target) -> list[Path]:
    """Return the files of inputs that once were handled wrongly."""
    return sorted((CORPUS / target.name.replace(" ", "-")).glob("*.bin"))


def keep(target: Target, data: bytes) -> Path:
    """Write an input to the corpus, and return its file."""
    directory = CORPUS / target.name.replace(" ", "-")
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{hashlib.sha256(data).hexdigest()[:16]}.bin"
    path.write_bytes(data)
    return path


def main() -> int:
    """Fuzz until the time is over; return 1 if an input was handled wrongly."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="for all parsers together")
    parser.add_argument("--inputs", type=int, help="for each parser, instead of a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="name each parser before its inputs")
    parser.add_argument("--only", nargs="+", default=(), help="names of targets")
    options = parser.parse_args()
    chosen = [one for one in targets() if not options.only or one.name in options.only]
    limit_memory()
    draws = {one.name: random.Random(f"{options.seed} {one.name}") for one in chosen}
    tried, faults = dict.fromkeys(draws, 0), 0
    broken: set[str] = set()
    deadline = math.inf if options.inputs else time.monotonic() + options.seconds
    left = list(chosen)
    while left and time.monotonic() < deadline:
        left = [
            one for one in left if one.name not in broken and tried[one.name] < (options.inputs or math.inf)
        ]
        for target in left:
            draw = draws[target.name]
            sys.stdout.write(f"{target.name} from {tried[target.name]}\n" if options.verbose else "")
            sys.stdout.flush()
            for _ in range(_ROUND):
                data = mutated(draw.choice(target.seeds), target.seeds, draw)
                tried[target.name] += 1
                fault = fault_of(target, data)
                if fault is not None:
                    faults += 1
                    broken.add(target.name)
                    sys.stdout.write(f"{target.name}: {keep(target, data)}\n{fault}\n")
                    break
    sys.stdout.write(f"{sum(tried.values())} inputs for {len(chosen)} parsers, {faults} handled wrongly\n")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
