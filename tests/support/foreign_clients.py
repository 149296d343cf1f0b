"""
Unmodified clients in Go (franz-go) and JavaScript (KafkaJS), which read records and print them.

Their programs are in `tests/support/clients`. They are built outside the source tree, in `~/.cache/tieringd`
or in `$TIERINGD_CACHE`, in a directory for each state of their sources, which exists only when it is
complete. `python -m tests.support.foreign_clients` builds them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.support.components import used
from tests.support.kafka_jars import MissingPartError, cache_directory, tell_where

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.e2e.sample_topics import SeenRecord

_SOURCES = Path(__file__).with_name("clients")
_READ_SECONDS = 240


class ReadRecord(NamedTuple):
    """A record as both clients print it. They cannot tell an empty header from one without a value."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def read_records(seen: Sequence[SeenRecord]) -> list[ReadRecord]:
    """Return what the clients print of records that Kafka's own protocol gives, for comparison."""
    return [
        ReadRecord(
            one.offset,
            one.timestamp_ms,
            one.key,
            one.value,
            tuple((name, value or b"") for name, value in one.headers),
        )
        for one in seen
    ]


def grouped_headers(records: Sequence[ReadRecord]) -> list[ReadRecord]:
    """Return *records* as KafkaJS gives them: the headers of one name are together."""
    return [
        one._replace(
            headers=tuple(
                (name, value) for name in dict(one.headers) for other, value in one.headers if other == name
            )
        )
        for one in records
    ]


async def read_go(
    bootstrap: str, topic: str, isolation: str, count: int, *, group: str | None = None
) -> list[ReadRecord]:
    """Read *count* records of partition 0 with franz-go: from the beginning, or from where *group* is."""
    used("franz-go")
    command = [str(_required() / "go-reader"), bootstrap, topic, isolation, str(count)]
    return await _records_of(command if group is None else [*command, group])


async def read_node(
    bootstrap: str, topic: str, isolation: str, count: int, *, group: str
) -> list[ReadRecord]:
    """
    Read *count* records of partition 0 with KafkaJS, from where *group* is. KafkaJS needs a group.

    The records are as `grouped_headers` returns them.
    """
    used("KafkaJS")
    program = str(_required() / "reader.mjs")
    return await _records_of(["node", program, bootstrap, topic, isolation, str(count), group])


async def _records_of(command: list[str]) -> list[ReadRecord]:
    """Run a reader to its end, and return what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), _READ_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return [_record(json.loads(line)) for line in output.splitlines()]


def _record(printed: dict) -> ReadRecord:
    return ReadRecord(
        printed["offset"],
        printed["timestamp_ms"],
        _bytes(printed["key"]),
        _bytes(printed["value"]),
        tuple((each["name"], _bytes(each["value"]) or b"") for each in printed["headers"]),
    )


def _bytes(encoded: str | None) -> bytes | None:
    return None if encoded is None else base64.b64decode(encoded)


def _directory() -> Path:
    """Return the directory of what is built from today's sources, which may not exist yet."""
    contents = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*")):
        if path.is_file():
            contents.update(f"{path.relative_to(_SOURCES)}\0".encode())
            contents.update(path.read_bytes())
    return cache_directory() / f"clients-{contents.hexdigest()[:12]}"


def _required() -> Path:
    """
    Return the directory of the built clients.

    Raises:
        MissingPartError: They have not been built.
    """
    directory = _directory()
    if not directory.is_dir():
        raise MissingPartError(f"{directory} is missing; run `python -m tests.support.foreign_clients`")
    return directory


def build_clients() -> Path:
    """
    Build both clients unless they are built, and return their directory.

    Raises:
        MissingPartError: Go, Node.js or npm is not installed, or a build failed.
    """
    directory = _directory()
    if directory.is_dir():
        return directory
    for name, package in (("go", "golang"), ("node", "nodejs"), ("npm", "npm")):
        if shutil.which(name) is None:
            raise MissingPartError(f"{name} is not installed; install it (Debian: {package})")
    directory.parent.mkdir(parents=True, exist_ok=True)
    # The rename is the last step, so that an existing directory is always complete.
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix="building-") as temporary:
        built = Path(temporary) / "clients"
        shutil.copytree(_SOURCES / "node", built)
        _run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts"], built)
        # Without optimisation the compiler needs half of the time.
        compile_go = ["go", "build", "-gcflags=all=-N -l", "-o", str(built / "go-reader"), "."]
        _run(compile_go, _SOURCES / "go", CGO_ENABLED="0")
        try:
            built.rename(directory)
        except OSError:
            # Another process was faster; its directory is as complete as this one.
            if not directory.is_dir():
                raise
    return directory


def _run(command: list[str], directory: Path, **environment: str) -> None:
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=directory,
        env=os.environ | environment,
    )
    if done.returncode != 0:
        raise MissingPartError(f"{' '.join(command[:2])} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(tell_where(build_clients))
