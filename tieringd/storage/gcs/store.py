"""
Google Cloud Storage, by its JSON API through gcloud-aio.

Every upload is one multipart request that carries the CRC32C of its bytes, so Google refuses other
bytes. If a server does not compare checksums, a wrong object is deleted again. Uploads are not
resumable, and nothing is retried here. Versions are generations.

`steps_to` plans how many objects become one, because a compose request takes 32 at most. More objects
are joined in levels: each 32 into an intermediate object, then the intermediate objects. Their names
follow from the final object's name, so a repeated join overwrites them, and they are deleted in the end.
No manifest references those that a killed process left behind, and they are found like any other
unreferenced object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from crc32c import crc32c as crc32c_of

from tieringd.errors import ChecksumRejected, StorageError, StorageUnavailable, TieringError
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfAbsent,
    Joined,
    JoinSource,
    ListPage,
    ObjectInfo,
)
from tieringd.storage.body import FileBody
from tieringd.storage.calls import Call, require_whole
from tieringd.storage.gcs.client import GcsClient, RelatedBody
from tieringd.storage.gcs.gcs_responses import (
    LISTED_FIELDS,
    OBJECT_FIELDS,
    GcsResponse,
    document_of,
    encoded_crc32c,
    info_of_document,
    info_of_media,
    malformed,
)
from tieringd.storage.receive import ranged
from tieringd.storage.store_settings import GcsSettings
from tieringd.storage.threads import in_thread_if_large

SOURCES_MAX = 32
"""The most sources of one compose request."""

_KEEPING_FIELDS = "versioning,softDeletePolicy,retentionPolicy,defaultEventBasedHold,objectRetention"
_MOST_RESULTS = 1000  # In one page of a listing.
_DELETES_AT_ONCE = 16
_TIDY_SECONDS = 5.0
"""The longest that a caller waits until intermediate objects, which no manifest names, are deleted."""
_ABSENT = frozenset({HTTPStatus.NOT_FOUND})
_PAST_THE_END = frozenset({HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE})


@dataclass(frozen=True, slots=True)
class Step:
    """One compose request: the objects *keys* become the object *key*."""

    key: str
    keys: tuple[str, ...]


def steps_to(key: str, sources: Sequence[str]) -> list[Step]:
    """Return the compose requests that make *key* of *sources*, in order; the last one makes *key*."""
    steps: list[Step] = []
    keys, level = tuple(sources), 0
    while len(keys) > SOURCES_MAX:
        groups = [keys[start : start + SOURCES_MAX] for start in range(0, len(keys), SOURCES_MAX)]
        made = [Step(f"{key}.part-{level}-{number}", group) for number, group in enumerate(groups)]
        steps += made
        keys, level = tuple(step.key for step in made), level + 1
    return [*steps, Step(key, keys)]


class GcsStore:
    """A bucket of Cloud Storage. Build it with `open`, inside the loop that uses it."""

    has_own_clock = True

    def __init__(self, settings: GcsSettings, client: GcsClient) -> None:
        self._settings = settings
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._client = client

    @classmethod
    async def open(cls, settings: GcsSettings) -> GcsStore:
        """
        Build the client. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint or a file of the settings cannot be used.
        """
        return cls(settings, await GcsClient.open(settings))

    @property
    def credentials_end(self) -> float | None:
        """Return when the credentials expire; see `ExpiringStore`."""
        return self._client.credentials_end

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object in one request."""
        call = Call("put", self._bucket, key)
        description = {"name": self._prefix + key, "crc32c": encoded_crc32c(crc32c)}
        if self._settings.storage_class is not None:
            description["storageClass"] = self._settings.storage_class
        answer = await self._upload(call, description, body, self._upload_parameters(condition))
        info = info_of_document(call, key, document_of(call, answer))
        if info.crc32c is None:
            raise malformed(call, "has no checksum of the stored object")
        if info.crc32c != crc32c:
            await self._take_back(call, info)
        return info

    async def _upload(
        self, call: Call, description: dict[str, str], body: Body, parameters: dict[str, str]
    ) -> GcsResponse:
        stall_seconds = self._client.stall_seconds
        content: bytes | FileBody
        if isinstance(body, FileSlice):
            content = FileBody(body, executor=self._client.executor, stall_seconds=stall_seconds)
        else:
            content = body
        upload = RelatedBody(description, content, stall_seconds=stall_seconds)
        call.may_have_effect = lambda: upload.is_sent
        try:
            return await self._client.request(
                call, "POST", self._client.uploads_url, params=parameters, body=upload
            )
        except StorageUnavailable as error:
            if upload.failure is not None:
                raise upload.failure from error
            raise
        finally:
            await upload.stop()

    def _upload_parameters(self, condition: Condition | None) -> dict[str, str]:
        parameters = {"uploadType": "multipart", "fields": OBJECT_FIELDS}
        if self._settings.kms_key_name is not None:
            parameters["kmsKeyName"] = self._settings.kms_key_name
        if condition is not None:
            generation = "0" if isinstance(condition, IfAbsent) else condition.version
            parameters["ifGenerationMatch"] = generation
        return parameters

    async def _take_back(self, call: Call, info: ObjectInfo) -> None:
        """
        Delete a wrong object that the server stored without comparing checksums, and raise.

        Raises:
            ChecksumRejected: Always. The message tells whether the wrong object was deleted.
        """
        text = f"{call.subject}: the server received other bytes than were sent"
        try:
            await self._client.request(
                Call("delete", self._bucket, call.key),
                "DELETE",
                self._url(info.key),
                params={"generation": info.version},
                accept=_ABSENT,
            )
        except TieringError as error:
            raise ChecksumRejected(
                f"{text}, and still holds them as generation {info.version}", key=call.key
            ) from error
        raise ChecksumRejected(text, key=call.key)

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """Compose an object of several. Google knows the checksum of the result."""
        *before, last = steps_to(key, [source.key for source in sources])
        try:
            for step in before:
                await self._compose(Call("join", self._bucket, step.key), step, None)
            call = Call("join", self._bucket, key)
            call.may_have_effect = lambda: True
            info = await self._compose(call, last, condition)
            if info.crc32c is None:
                raise malformed(call, "does not describe the composed object")
            if (info.size_bytes, info.crc32c) != (sum(source.size_bytes for source in sources), crc32c):
                await self._take_back(call, info)
        finally:
            with suppress(StorageError, StorageUnavailable, TimeoutError):
                async with asyncio.timeout(_TIDY_SECONDS):
                    await self.delete_many([step.key for step in before])
        return Joined(info, is_proven=True, host_bytes=0)

    async def _compose(self, call: Call, step: Step, condition: Condition | None) -> ObjectInfo:
        description = {"contentType": "application/octet-stream"}
        if self._settings.storage_class is not None:
            description["storageClass"] = self._settings.storage_class
        parameters = self._upload_parameters(condition)
        del parameters["uploadType"]
        document = {
            "sourceObjects": [{"name": self._prefix + key} for key in step.keys],
            "destination": description,
        }
        answer = await self._client.request(
            call,
            "POST",
            f"{self._url(step.key)}/compose",
            params=parameters,
            headers={"Content-Type": "application/json"},
            body=json.dumps(document).encode(),
        )
        return info_of_document(call, step.key, document_of(call, answer))

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole. Its checksum is verified if the server knows one."""
        call = Call("get", self._bucket, key)
        answer = await self._client.request(call, "GET", self._url(key), params={"alt": "media"})
        require_whole(call, len(answer.body), answer.headers)
        info = info_of_media(call, key, answer)
        body = answer.body
        if info.crc32c is not None and await in_thread_if_large(len(body), crc32c_of, body) != info.crc32c:
            raise StorageUnavailable(f"{call.subject}: the received bytes have a wrong checksum")
        return body, info

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range in one request."""
        if size_bytes == 0:
            await self.head(key)
            return b""
        call = Call("get_range", self._bucket, key)
        answer = await self._client.request(
            call,
            "GET",
            self._url(key),
            params={"alt": "media"},
            headers={"Range": f"bytes={position}-{position + size_bytes - 1}"},
            accept=_PAST_THE_END,
        )
        return ranged(
            call,
            answer.body,
            status=answer.status,
            headers=answer.headers,
            position=position,
            size_bytes=size_bytes,
        )

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum."""
        call = Call("head", self._bucket, key)
        answer = await self._client.request(call, "GET", self._url(key), params={"fields": OBJECT_FIELDS})
        return info_of_document(call, key, document_of(call, answer))

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of a listing. Google's start is inclusive, and its pages may even be empty."""
        call = Call(f"list {prefix}*", self._bucket)
        parameters = {
            "prefix": self._prefix + prefix,
            "maxResults": str(min(limit + 1, _MOST_RESULTS)),
            "fields": LISTED_FIELDS,
        }
        if start_after is not None:
            parameters["startOffset"] = self._prefix + start_after
        objects: list[ObjectInfo] = []
        has_more = True
        while has_more and not objects:
            page = document_of(
                call, await self._client.request(call, "GET", self._client.objects_url, params=parameters)
            )
            found = (self._listed(call, item) for item in page.get("items", ()))
            objects = [info for info in found if info.key != start_after]
            parameters["pageToken"] = page.get("nextPageToken", "")
            has_more = bool(parameters["pageToken"])
        has_more |= len(objects) > limit
        objects = objects[:limit]
        return ListPage(tuple(objects), objects[-1].key if has_more else None)

    def _listed(self, call: Call, item: Mapping[str, Any]) -> ObjectInfo:
        if "name" not in item:
            raise malformed(call, "lists an object without a name")
        return info_of_document(call, str(item["name"]).removeprefix(self._prefix), item)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """
        Delete objects, several at a time. The first failure ends the rest.

        Raises:
            StorageError: An object was refused; the message names it.
        """
        remaining = iter(keys)
        tasks = min(_DELETES_AT_ONCE, self._settings.max_connections, len(keys))
        failure: Exception | None = None
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._delete_each(remaining)) for _ in range(tasks)]
        except ExceptionGroup as group_failure:
            failure = group_failure.exceptions[0]
        if failure is not None:
            raise failure
        if any(worker.result() for worker in workers):
            await self._client.require_bucket(Call("delete", self._bucket))

    async def _delete_each(self, keys: Iterator[str]) -> bool:
        """Delete keys until none is left. Return whether a 404 may have been about a missing bucket."""
        is_in_doubt = False
        for key in keys:
            call = Call("delete", self._bucket, key)
            answer = await self._client.request(call, "DELETE", self._url(key), accept=_ABSENT)
            is_in_doubt |= answer.status == HTTPStatus.NOT_FOUND and not answer.names_the_object
        return is_in_doubt

    async def kept_after_delete(self, _key: str) -> tuple[str, ...]:
        """Return whether the bucket has versions, soft delete, a retention policy, holds or locks."""
        call = Call("get bucket", self._bucket)
        answer = await self._client.request(
            call, "GET", self._client.bucket_url, params={"fields": _KEEPING_FIELDS}
        )
        found = document_of(call, answer)
        soft_seconds = int(found.get("softDeletePolicy", {}).get("retentionDurationSeconds", 0))
        kept_seconds = int(found.get("retentionPolicy", {}).get("retentionPeriod", 0))
        ways = {
            "the bucket keeps versions: a deleted object stays as a noncurrent version": bool(
                found.get("versioning", {}).get("enabled")
            ),
            f"soft delete keeps deleted objects for {soft_seconds} seconds": bool(soft_seconds),
            f"the bucket's retention policy keeps objects for {kept_seconds} seconds": bool(kept_seconds),
            "new objects have a hold, and stay until the hold is released": bool(
                found.get("defaultEventBasedHold")
            ),
            "objects may be locked": found.get("objectRetention", {}).get("mode") == "Enabled",
        }
        return tuple(way for way, holds in ways.items() if holds)

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Tell *listener* the time of the service's responses."""
        self._client.times.listen(listener)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _url(self, key: str) -> str:
        return self._client.object_url(self._prefix + key)
