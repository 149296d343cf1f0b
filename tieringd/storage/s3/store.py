"""
S3 and compatible stores, through aiobotocore.

One client with one connection pool. The SDK's retries are off (`storage.resilient` retries) and so is
its own hashing: every PUT carries the CRC32C that its caller computed while reading the data, and the
server checks it. Versions are ETags. The SDK finds proxies in the environment (HTTPS_PROXY, HTTP_PROXY,
NO_PROXY).

`info_of` and its neighbours translate the fields of S3's responses to those of `storage.base`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from http import HTTPStatus
from typing import Any

from botocore.credentials import ReadOnlyCredentials
from crc32c import crc32c as crc32c_of

from tieringd.errors import BucketNotFound, ObjectNotFound, StorageError, StorageUnavailable
from tieringd.storage.base import (
    Body,
    Condition,
    FileSlice,
    IfAbsent,
    Joined,
    JoinSource,
    ListPage,
    ObjectInfo,
    Take,
)
from tieringd.storage.body import FileBody
from tieringd.storage.calls import Call, require, require_whole
from tieringd.storage.ranges import Windows
from tieringd.storage.receive import ranged, receive, receive_in_windows, require_range
from tieringd.storage.s3.client import USER_AGENT, OneTrySession, check, open_client
from tieringd.storage.s3.credentials import RoleCredentials
from tieringd.storage.s3.direct_requests import DirectRequests
from tieringd.storage.s3.errors import bucket_not_found, from_answer, is_expired, translated
from tieringd.storage.s3.joining import PartJoin
from tieringd.storage.s3.multipart import (
    CHECKSUM_METADATA,
    MultipartUploads,
    answered_at_ms,
    decode_crc32c,
    encode_crc32c,
)
from tieringd.storage.store_settings import S3Settings
from tieringd.storage.store_times import StoreTimes
from tieringd.storage.threads import body_threads, in_thread, in_thread_if_large

_DELETE_BATCH = 1000  # The most that one DeleteObjects takes.

_ANSWERED_EARLY = frozenset({"CompleteMultipartUpload", "CopyObject", "UploadPartCopy"})
"""Operations whose responses begin, with their Date header, minutes before they end."""


def _headers(answer: dict[str, Any]) -> Mapping[str, str]:
    headers: Mapping[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers


def info_of(call: Call, key: str, answer: dict[str, Any], *, size_bytes: int) -> ObjectInfo:
    """Return the description of an object in a response to GET or HEAD."""
    modified_ms = milliseconds(require(call, answer, "LastModified"))
    return ObjectInfo(key, size_bytes, require(call, answer, "ETag"), _crc32c(answer), modified_ms)


def _crc32c(answer: dict[str, Any]) -> int | None:
    """
    Return the checksum of a whole object; None if unknown.

    For an object sent in parts, the server reports a checksum composed of the parts' checksums, and not
    every server marks it as such. The metadata then holds the checksum of the whole, which the upload
    checked against its parts.
    """
    text, kind = answer.get("ChecksumCRC32C"), answer.get("ChecksumType")
    whole = answer.get("Metadata", {}).get(CHECKSUM_METADATA)
    if whole is not None:
        return decode_crc32c(whole)
    return None if text is None or "-" in text or kind == "COMPOSITE" else decode_crc32c(text)


def milliseconds(moment: Any) -> int:
    """Return a point in time in milliseconds since 1970."""
    return int(moment.timestamp() * 1000)


def status_of(error: StorageError) -> int:
    """Return the HTTP status behind an error, 0 when there is none."""
    answer = getattr(error.__cause__, "response", {})
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


class S3Store:
    """
    A bucket on an S3 server. Build it with `open`, inside the loop that uses it.

    Its threads move the bytes of large bodies; there are at most as many as connections.
    """

    has_own_clock = True

    def __init__(
        self,
        settings: S3Settings,
        client: Any,
        resources: AsyncExitStack,
        session: Callable[[], OneTrySession],
        credentials: RoleCredentials | None = None,
    ) -> None:
        self._settings = settings
        self._credentials = credentials
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._stall_seconds = settings.read_timeout_seconds
        self._client = client
        self._resources = resources
        self._executor = body_threads(settings.max_connections, name="tieringd-s3")
        resources.callback(self._executor.shutdown, wait=False)
        # These threads check what they receive, which takes the interpreter's lock: they keep the loop's
        # priority.
        self._readers = ThreadPoolExecutor(settings.max_connections, thread_name_prefix="tieringd-s3-read")
        resources.callback(self._readers.shutdown, wait=False)
        self._windows = Windows()
        self._encryption = _encryption_parameters(settings)
        self._times = StoreTimes()
        # Every response counts, errors included: a server that refuses our clock also sends its own time.
        client.meta.events.register("after-call.s3", self._note_date)
        self._requests = DirectRequests(
            client,
            session=session,
            credentials=self._keys if credentials is None else credentials.get_frozen_credentials,
            user_agent=USER_AGENT,
            note_headers=self._times.note_date,
        )

    async def _keys(self) -> ReadOnlyCredentials:
        return ReadOnlyCredentials(self._settings.access_key, self._settings.secret_key, None)

    def _note_date(self, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        if model.name not in _ANSWERED_EARLY:
            self._times.note_date(parsed.get("ResponseMetadata", {}).get("HTTPHeaders", {}))

    def tell_time_to(self, listener: Callable[[int | None], None]) -> None:
        """Tell *listener* the time of the server's responses."""
        self._times.listen(listener)

    @classmethod
    async def open(cls, settings: S3Settings) -> S3Store:
        """
        Build the client. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint, a file or the credentials of the settings cannot be used.
        """
        check(settings)
        async with AsyncExitStack() as resources:
            client, session, credentials = await open_client(settings, resources)
            return cls(settings, client, resources.pop_all(), session, credentials)
        raise AssertionError("an exit stack swallows nothing")

    @contextmanager
    def _asking(self, call: Call) -> Iterator[None]:
        """Raise errors of our tree. Expired credentials are discarded, and the error allows a retry."""
        credentials = self._credentials
        generation = credentials.generation if credentials else 0
        try:
            with translated(call):
                yield
        except StorageError as error:
            if credentials is not None and is_expired(error) and credentials.renew(generation):
                raise StorageUnavailable(
                    f"{call.subject}: the credentials have expired; new ones are being fetched"
                ) from error
            raise
        if credentials is not None:
            credentials.note_success()

    @property
    def credentials_end(self) -> float | None:
        """Return when the credentials expire; see `ExpiringStore`."""
        return None if self._credentials is None else self._credentials.end

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object in one request, or in parts from the settings' threshold on."""
        call = Call("put", self._bucket, key, is_conditional_put=condition is not None)
        place = self._place_of(key)
        limits = _condition_parameters(condition)
        if not isinstance(body, FileSlice) or not body.size_bytes:
            data = b"" if isinstance(body, FileSlice) else body
            call.may_have_effect = lambda: True
            with self._asking(call):
                answer = await self._requests.put_object(
                    **place, **limits, **self._encryption, Body=data, ChecksumCRC32C=encode_crc32c(crc32c)
                )
            return _stored(call, key, len(data), answer, crc32c)
        attributes = self._encryption | _storage_class_parameters(self._settings)
        if body.size_bytes >= self._settings.multipart_threshold_bytes:
            answer = await self._uploads().put(
                call, body, place=place, crc32c=crc32c, condition=limits, attributes=attributes
            )
        else:
            parameters = {**place, **limits, **attributes, "ChecksumCRC32C": encode_crc32c(crc32c)}
            answer = await self._send_file(call, body, self._requests.put_object, parameters, may_store=True)
            return _stored(call, key, body.size_bytes, answer, crc32c)
        return ObjectInfo(key, body.size_bytes, require(call, answer, "ETag"), crc32c, answered_at_ms(answer))

    async def _send_file(
        self,
        call: Call,
        file_slice: FileSlice,
        request: Callable[..., Awaitable[Any]],
        parameters: dict[str, Any],
        *,
        may_store: bool = False,
    ) -> dict[str, Any]:
        body = FileBody(file_slice, executor=self._executor, stall_seconds=self._stall_seconds)
        call.may_have_effect = lambda: may_store and body.is_sent
        try:
            with self._asking(call):
                try:
                    answer: dict[str, Any] = await request(Body=body, **parameters)
                finally:
                    await body.stop()
        except StorageUnavailable as error:
            if body.failure is not None:
                raise body.failure from error
            raise
        return answer

    def _uploads(self) -> MultipartUploads:
        return MultipartUploads(
            self._client,
            self._bucket,
            self._executor,
            self._asking,
            self._send_file,
            self._settings.multipart_part_bytes,
        )

    async def join(
        self, key: str, sources: Sequence[JoinSource], *, crc32c: int, condition: Condition | None = None
    ) -> Joined | None:
        """
        Store an object whose parts the server copies. This host sends what is too small for a part.

        Returns None if the server cannot copy parts.
        """
        call = Call("join", self._bucket, key, is_conditional_put=condition is not None)
        join = PartJoin(
            self._uploads(),
            self._place_of,
            self.head,
            lambda piece: self.get_range(
                piece.source.key, position=piece.position, size_bytes=piece.size_bytes
            ),
        )
        try:
            answer, is_proven, host_bytes = await join.join(
                call,
                key,
                sources,
                crc32c=crc32c,
                condition=_condition_parameters(condition),
                attributes=self._encryption | _storage_class_parameters(self._settings),
            )
        except StorageError as error:
            if status_of(error) == HTTPStatus.NOT_IMPLEMENTED:
                return None
            raise
        size_bytes = sum(source.size_bytes for source in sources)
        etag = require(call, answer, "ETag")
        info = ObjectInfo(key, size_bytes, etag, crc32c, answered_at_ms(answer))
        return Joined(info, is_proven=is_proven, host_bytes=host_bytes)

    def _place_of(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    async def discard_abandoned_uploads(
        self, is_ours: Callable[[str], bool], *, older_than_seconds: float = 86_400
    ) -> int:
        """
        Abort uploads in parts that a killed process left below our prefix; return how many.

        Their parts are charged for, and no listing of objects shows them. *is_ours* is called with each
        key, because a bucket may be shared. Uploads younger than *older_than_seconds* may still be at
        work; none takes a day.
        """
        return await self._uploads().discard_abandoned(
            self._prefix,
            lambda key: is_ours(key.removeprefix(self._prefix)),
            older_than_seconds=older_than_seconds,
        )

    async def unfinished_uploads(self) -> list[str]:
        """Return the keys of unfinished uploads below our prefix, also of those that are under way."""
        found = self._uploads().unfinished(self._prefix)
        return [one.key.removeprefix(self._prefix) async for one in found]

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole. Its checksum is verified if the server knows one."""
        call = Call("get", self._bucket, key)
        with self._asking(call):
            answer = await self._requests.get_object(
                Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED"
            )
            data = await self._body(answer)
            require_whole(call, len(data), _headers(answer))
        info = info_of(call, key, answer, size_bytes=len(data))
        if info.crc32c is not None and await in_thread_if_large(len(data), crc32c_of, data) != info.crc32c:
            raise StorageUnavailable(f"{call.subject}: the received bytes have a wrong checksum")
        return data, info

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range in one request."""
        if size_bytes == 0:
            await self.head(key)
            return b""
        call = Call("get_range", self._bucket, key)
        try:
            with self._asking(call):
                answer = await self._ask_range(key, position, size_bytes)
                return await self._whole_range(call, answer, position, size_bytes)
        except StorageError as error:
            if status_of(error) != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return b""

    async def read_range(self, key: str, *, position: int, size_bytes: int, begin: Callable[[], Take]) -> int:
        """Hand on the bytes of a range as they arrive, in one request; see `RangeStore`."""
        if size_bytes == 0:
            await self.head(key)
            return 0
        call = Call("get_range", self._bucket, key)
        try:
            with self._asking(call):
                answer = await self._ask_range(key, position, size_bytes)
                return await self._hand_on(call, answer, position, size_bytes, begin())
        except StorageError as error:
            if status_of(error) != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                raise
            return 0

    async def _hand_on(
        self, call: Call, answer: dict[str, Any], position: int, size_bytes: int, take: Take
    ) -> int:
        is_partial = answer["ResponseMetadata"]["HTTPStatusCode"] == HTTPStatus.PARTIAL_CONTENT
        if not is_partial or "ContentLength" not in answer:
            # The server sends the whole object, or chunks whose size is known only after the last one.
            data = await self._whole_range(call, answer, position, size_bytes)
            await in_thread(take, memoryview(data))
            return len(data)
        async with answer["Body"] as stream:
            require_range(
                call,
                answer["ContentLength"],
                content_range=answer.get("ContentRange"),
                position=position,
                size_bytes=size_bytes,
            )
            received_bytes = await receive_in_windows(
                stream.raw_stream,
                take,
                windows=self._windows,
                executor=self._readers,
                stall_seconds=self._stall_seconds,
            )
        require_whole(call, received_bytes, _headers(answer))
        return received_bytes

    async def _ask_range(self, key: str, position: int, size_bytes: int) -> dict[str, Any]:
        last = position + size_bytes - 1
        return await self._requests.get_object(**self._place_of(key), Range=f"bytes={position}-{last}")

    async def _whole_range(self, call: Call, answer: dict[str, Any], position: int, size_bytes: int) -> bytes:
        return ranged(
            call,
            await self._body(answer),
            status=answer["ResponseMetadata"]["HTTPStatusCode"],
            headers=_headers(answer),
            position=position,
            size_bytes=size_bytes,
        )

    async def _body(self, answer: dict[str, Any]) -> bytes:
        async with answer["Body"] as stream:
            return await receive(
                stream.raw_stream, executor=self._executor, stall_seconds=self._stall_seconds
            )

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum."""
        call = Call("head", self._bucket, key)
        try:
            with self._asking(call):
                answer = await self._requests.head_object(
                    Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED"
                )
        except ObjectNotFound:
            # A response to HEAD has no body, and so no code that distinguishes a missing object from a
            # missing bucket.
            await self._require_bucket(call)
            raise
        return info_of(call, key, answer, size_bytes=require(call, answer, "ContentLength"))

    async def _require_bucket(self, call: Call) -> None:
        try:
            with self._asking(call):
                await self._client.head_bucket(Bucket=self._bucket)
        except ObjectNotFound as error:
            raise bucket_not_found(call) from error

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """
        Return one page of ListObjectsV2.

        A page may be empty and yet not be the last one, for example over many deleted versions. Such pages
        are passed over.
        """
        parameters: dict[str, Any] = {
            "Bucket": self._bucket,
            "Prefix": self._prefix + prefix,
            "MaxKeys": limit,
        }
        if start_after is not None:
            parameters["StartAfter"] = self._prefix + start_after
        call = Call(f"list {prefix}*", self._bucket)
        entries: list[dict[str, Any]] = []
        has_more = True
        while has_more and not entries:
            with self._asking(call):
                answer = await self._client.list_objects_v2(**parameters)
            entries = answer.get("Contents", [])
            has_more = require(call, answer, "IsTruncated")
            if has_more and not entries:
                parameters["ContinuationToken"] = require(call, answer, "NextContinuationToken")
        objects = tuple(
            ObjectInfo(
                require(call, entry, "Key").removeprefix(self._prefix),
                require(call, entry, "Size"),
                require(call, entry, "ETag"),
                None,
                milliseconds(require(call, entry, "LastModified")),
            )
            for entry in entries
        )
        return ListPage(objects, objects[-1].key if has_more else None)

    async def delete_many(self, keys: Sequence[str]) -> None:
        """
        Delete objects, 1000 in a request.

        Raises:
            StorageError: Some objects were refused; the message names the first and counts the rest.
        """
        for start in range(0, len(keys), _DELETE_BATCH):
            await self._delete_batch(keys[start : start + _DELETE_BATCH])

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        call = Call("delete", self._bucket)
        objects = [{"Key": self._prefix + key} for key in keys]
        with self._asking(call):
            answer = await self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        errors = [each for each in answer.get("Errors", ()) if each.get("Code") != "NoSuchKey"]
        if errors:
            first = errors[0]
            call.key = first.get("Key", self._prefix).removeprefix(self._prefix) or None
            error = from_answer(call, {"Error": first})
            error.hint = f"{len(errors)} of {len(keys)} objects were refused; {error.hint or 'try again'}"
            raise error

    async def kept_after_delete(self, _key: str) -> tuple[str, ...]:
        """Return whether the bucket has versions and locks."""
        kept: list[str] = []
        versioning = await self._asked("get_bucket_versioning")
        match versioning.get("Status"):
            case "Enabled":
                kept.append("the bucket keeps versions: a deleted object stays as an older version")
            case "Suspended":
                kept.append("the bucket kept versions earlier, and still has those versions")
        lock = (await self._asked("get_object_lock_configuration")).get("ObjectLockConfiguration", {})
        if lock.get("ObjectLockEnabled") == "Enabled":
            rule = lock.get("Rule", {}).get("DefaultRetention", {})
            lasts = " ".join(f"{rule[unit]} {unit.lower()}" for unit in ("Days", "Years") if rule.get(unit))
            kept.append(f"object lock keeps each version for {lasts}" if lasts else "objects may be locked")
        return tuple(kept)

    async def _asked(self, question: str) -> dict[str, Any]:
        """Return the server's response about the bucket; empty where the server has no such feature."""
        call = Call(question.replace("_", " "), self._bucket)
        try:
            with self._asking(call):
                answer: dict[str, Any] = await getattr(self._client, question)(Bucket=self._bucket)
        except BucketNotFound:
            raise
        except StorageError as error:
            if status_of(error) in {HTTPStatus.NOT_FOUND, HTTPStatus.NOT_IMPLEMENTED}:
                return {}
            raise
        return answer

    async def close(self) -> None:
        """Close the connections."""
        await self._resources.aclose()


def _stored(call: Call, key: str, size_bytes: int, answer: dict[str, Any], crc32c: int) -> ObjectInfo:
    """Return the stored object's description. Its checksum is the server's, if the response has one."""
    told = answer.get("ChecksumCRC32C")
    found = crc32c if told is None else decode_crc32c(told)
    return ObjectInfo(key, size_bytes, require(call, answer, "ETag"), found, answered_at_ms(answer))


def _condition_parameters(condition: Condition | None) -> dict[str, str]:
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if isinstance(condition, IfAbsent) else {"IfMatch": condition.version}


def _encryption_parameters(settings: S3Settings) -> dict[str, str]:
    wanted = {"ServerSideEncryption": settings.encryption, "SSEKMSKeyId": settings.kms_key_id}
    return {name: value for name, value in wanted.items() if value is not None}


def _storage_class_parameters(settings: S3Settings) -> dict[str, str]:
    return {} if settings.storage_class is None else {"StorageClass": settings.storage_class}
