"""
The records of rewritings of one bucket: stored before what they name takes its place.

Rebuild goes by them where a manifest is lost. They need no index and no manifest: they lie beside the
partition's, and scrub keeps them for as long as the manifest names anything that was rewritten.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from tieringd.archive.scrub.segment_look import read_object
from tieringd.errors import CorruptDataError
from tieringd.formats.object_keys import rewriting_key
from tieringd.formats.rewriting_record import decode_rewriting, encode_rewriting

if TYPE_CHECKING:
    from tieringd.model.partition import TopicIdPartition
    from tieringd.model.rewriting import Rewriting
    from tieringd.storage.base import ObjectStore


async def store_rewriting(store: ObjectStore, partition: TopicIdPartition, rewriting: Rewriting) -> str:
    """
    Store the record of a rewriting, whose segments are stored, and return its key. Doing it again is safe.

    Raises:
        StorageUnavailable: It may be stored or not.
    """
    data = encode_rewriting(partition, rewriting)
    checksum = crc32c(data)
    key = rewriting_key(partition, rewriting.writer_id, crc32c=checksum)
    await store.put(key, data, crc32c=checksum)
    return key


async def load_rewriting(
    store: ObjectStore, partition: TopicIdPartition, key: str, *, size_bytes: int
) -> Rewriting:
    """
    Return what the record under *key* says.

    Raises:
        ObjectNotFound: It has gone.
        CorruptDataError: It is damaged, or another partition's.
    """
    data = await read_object(store, key, size_bytes=size_bytes)
    owner, rewriting = decode_rewriting(data, source=key)
    if rewriting_key(owner, rewriting.writer_id, crc32c=crc32c(data)) != key or owner != partition:
        raise CorruptDataError("this record of a rewriting has other bytes than its name says", source=key)
    return rewriting
