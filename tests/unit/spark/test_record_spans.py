"""The search for records in machine code, where there is no place to keep that code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import tieringd

_SCRIPT = """
import tieringd
from tieringd.formats.record_batch import NewRecord, encode_batch, parse_header
from tieringd.spark.record_spans import record_spans

data = memoryview(encode_batch(5, [NewRecord(b"a")] * 2))
print(record_spans(parse_header(data), data).offsets.tolist(), tieringd.__file__)
"""


def test_code_is_made_again_where_it_cannot_be_kept(tmp_path):
    """
    The code is compiled at each start if neither the package nor the home is writable.

    It costs a second.
    """
    place = tmp_path / "site-packages"
    package = Path(tieringd.__file__).parent
    shutil.copytree(package, place / "tieringd", ignore=shutil.ignore_patterns("__pycache__"))
    # No user can make a directory where a file is in the way, root included.
    (place / "tieringd" / "spark" / "__pycache__").write_bytes(b"")
    (tmp_path / "home").write_bytes(b"")
    outer = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-B", "-c", _SCRIPT],
        cwd="/",
        env=outer | {"PYTHONPATH": str(place), "HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, f"[5, 6] {place}/tieringd/__init__.py\n"), done.stderr
