"""
The mark of a recovery into a cluster: how far the records of one partition have come.

It is committed as a consumer group's offset for the target partition, in the same transaction as the
records before it, so that a next attempt begins where the last one ended, whichever way that was. The
offset is where reading the archive goes on; all else is the text beside it, as JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tieringd.errors import CorruptDataError

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecoveryMark:
    """What has been written to one partition of a target topic."""

    next_offset: int
    """Of the archive: all visible records before it are in the target."""
    target_topic_id: str
    """A topic that was deleted and created again has none of them."""
    isolation: str
    """Which records were visible: `read_committed` or `read_uncommitted`."""
    records: int = 0
    first_source: int | None = None
    first_target: int | None = None
    last_source: int | None = None
    last_target: int | None = None


def encode_mark(mark: RecoveryMark) -> str:
    """Return the text that is committed beside the mark's offset."""
    document = asdict(mark)
    del document["next_offset"]
    return json.dumps({"version": _VERSION, **document}, separators=(",", ":"))


def decode_mark(next_offset: int, text: str) -> RecoveryMark:
    """
    Return the mark of an offset and its text.

    Raises:
        CorruptDataError: This is no mark of ours, or one of a newer release.
    """
    try:
        document = json.loads(text)
        version = document.pop("version")
        if version != _VERSION:
            raise CorruptDataError(
                f"the mark of a recovery has version {version}; this release reads {_VERSION}",
                hint="Go on with the release that began it",
            )
        return RecoveryMark(next_offset, **document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"the mark of a recovery cannot be read: {text!r}") from error
