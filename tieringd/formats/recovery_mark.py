"""
The mark of a recovery into a cluster: the progress of one partition.

It is committed as a consumer group's offset for the target partition, in the same transaction as the
records before it. So the next attempt begins where the last one ended, however that one ended. The
offset is the position in the archive at which reading continues; all other fields are JSON text in the
offset's metadata.

The mark names the newest of the archive's replacements (`Replacement`) that were listed before its records
were read. An unclean election may replace records that are written, and the archive may be as long as before
when the next attempt looks. The newest one alone is stored: replacements are only appended, and a broker
limits the text.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tieringd.errors import CorruptDataError
from tieringd.formats.json_document import MALFORMED

_VERSION = 1


@dataclass(frozen=True, slots=True)
class RecoveryMark:
    """The records written to one partition of a target topic."""

    next_offset: int
    """The archive's offset before which all visible records are in the target."""
    target_topic_id: str
    """A topic that was deleted and created again has another id, and none of the records."""
    isolation: str
    """Which records were visible: `read_committed` or `read_uncommitted`."""
    records: int = 0
    first_source: int | None = None
    first_target: int | None = None
    last_source: int | None = None
    last_target: int | None = None
    newest_replacement: tuple[int, ...] | None = None
    """
    The `Replacement.identity` of the last replacement that the manifest listed before the records were read;
    empty where it listed none. None in a mark of an earlier release, which did not store it.
    """


def encode_mark(mark: RecoveryMark) -> str:
    """Return the text that is committed with the mark's offset."""
    document = asdict(mark)
    del document["next_offset"]
    if mark.newest_replacement is None:
        del document["newest_replacement"]
    return json.dumps({"version": _VERSION, **document}, separators=(",", ":"))


def decode_mark(next_offset: int, text: str) -> RecoveryMark:
    """
    Return the mark of an offset and its text.

    Raises:
        CorruptDataError: The text is not a mark of ours, or one of another version.
    """
    try:
        document = json.loads(text)
        version = document.pop("version")
        if version != _VERSION:
            raise CorruptDataError(
                f"the progress mark of a recovery has version {version}; this release reads {_VERSION}",
                hint="Continue with the release of tieringd that began the recovery",
            )
        newest = document.pop("newest_replacement", None)
        replaced = None if newest is None else tuple(map(int, newest))
        return RecoveryMark(next_offset, **document, newest_replacement=replaced)
    except MALFORMED as error:
        raise CorruptDataError(f"the progress mark of a recovery cannot be read: {text!r}") from error
