"""
S3 and what speaks like it, through aiobotocore.

One client with one connection pool. The SDK's retries are off (`storage.resilient` retries)
and so is its own hashing: every PUT carries the CRC32C that its caller computed while reading
the data, and the server checks it. Versions are ETags.
"""

from __future__ import annotations

import asyncio
import base64
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError
from botocore.handlers import add_expect_header
from crc32c import crc32c as crc32c_of

from tieringd.errors import ConfigError, ObjectNotFound, StorageError, StorageUnavailable
from tieringd.storage.base import FileSlice, IfAbsent, ListPage, ObjectInfo
from tieringd.storage.body import FileBody
from tieringd.storage.s3_errors import Call, bucket_not_found, from_answer, translated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tieringd.storage.base import Body, Condition

_DELETE_BATCH = 1000  # The most that one DeleteObjects takes.
_USER_AGENT = "tieringd"  # botocore builds its own anew for each request: 15% of a small one's cost.


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is and how to reach it."""

    bucket: str
    prefix: str = ""
    """Put before every key, with a slash between."""
    region: str = "us-east-1"
    endpoint_url: str | None = None
    """None for AWS itself."""
    access_key: str | None = None
    """None lets the SDK find a role: environment, instance metadata, web identity."""
    secret_key: str | None = field(default=None, repr=False)
    url_style: Literal["path", "virtual_host"] = "virtual_host"
    trust_file: str | None = None
    """A PEM file with the authorities to trust instead of the system's."""
    disable_tls: bool = False
    """Speak http where *endpoint_url* does not say."""
    max_connections: int = 20
    max_idle_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    """The longest silence: of a server that owes an answer, or that takes nothing of a body."""


class S3Store:
    """
    A bucket on an S3 server. Build it with `open`, inside the loop that uses it.

    Its threads move the bytes of large bodies; there are at most as many as connections.
    """

    def __init__(self, settings: S3Settings, client: Any, resources: AsyncExitStack) -> None:
        self._bucket = settings.bucket
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._stall_seconds = settings.read_timeout_seconds
        self._client = client
        self._resources = resources
        self._executor = ThreadPoolExecutor(settings.max_connections, thread_name_prefix="tieringd-s3")
        resources.callback(self._executor.shutdown, wait=False)

    @classmethod
    async def open(cls, settings: S3Settings) -> S3Store:
        """
        Build the client. Nothing is sent yet.

        Raises:
            ConfigError: The endpoint or a file of the settings cannot be used.
        """
        if settings.trust_file is not None and not Path(settings.trust_file).is_file():  # noqa: ASYNC240
            raise ConfigError(f"cloud_storage_trust_file: there is no file {settings.trust_file}")
        async with AsyncExitStack() as resources:
            try:
                client = await resources.enter_async_context(
                    get_session().create_client(
                        "s3",
                        region_name=settings.region,
                        endpoint_url=settings.endpoint_url,
                        aws_access_key_id=settings.access_key,
                        aws_secret_access_key=settings.secret_key,
                        use_ssl=not settings.disable_tls,
                        verify=settings.trust_file,
                        config=_config(settings),
                    )
                )
            except (BotoCoreError, ValueError) as error:
                raise ConfigError(
                    f"the S3 client for bucket {settings.bucket} cannot be built: {error}",
                    hint="check cloud_storage_api_endpoint and cloud_storage_region",
                ) from error
            # It costs every file-like body a round trip before the first byte.
            client.meta.events.unregister("before-call.s3", add_expect_header)
            return cls(settings, client, resources.pop_all())
        raise AssertionError("an exit stack swallows nothing")

    async def put(
        self, key: str, body: Body, *, crc32c: int, condition: Condition | None = None
    ) -> ObjectInfo:
        """Store an object in one request."""
        call = Call("put", self._bucket, key, is_conditional_put=condition is not None)
        parameters = {
            "Bucket": self._bucket,
            "Key": self._prefix + key,
            "ChecksumCRC32C": _encode_crc32c(crc32c),
            **_condition_parameters(condition),
        }
        if isinstance(body, FileSlice) and body.size_bytes:
            answer, size_bytes = await self._put_file(call, body, parameters), body.size_bytes
        else:
            data = b"" if isinstance(body, FileSlice) else body
            call.may_have_effect = lambda: True
            with translated(call):
                answer, size_bytes = await self._client.put_object(Body=data, **parameters), len(data)
        return ObjectInfo(key, size_bytes, answer["ETag"], crc32c, _answered_at_ms(answer))

    async def _put_file(
        self, call: Call, file_slice: FileSlice, parameters: dict[str, Any]
    ) -> dict[str, Any]:
        body = FileBody(file_slice, executor=self._executor, stall_seconds=self._stall_seconds)
        call.may_have_effect = lambda: body.is_sent
        try:
            with translated(call):
                try:
                    answer: dict[str, Any] = await self._client.put_object(Body=body, **parameters)
                finally:
                    await body.stop()
        except StorageUnavailable as error:
            if body.failure is not None:
                raise body.failure from error
            raise
        return answer

    async def get(self, key: str) -> tuple[bytes, ObjectInfo]:
        """Return an object whole, its checksum checked where the server knows one."""
        call = Call("get", self._bucket, key)
        with translated(call):
            answer = await self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED"
            )
            data = await _read_whole(call, answer)
        info = _info(key, answer, size_bytes=len(data))
        if info.crc32c is not None and await asyncio.to_thread(crc32c_of, data) != info.crc32c:
            raise StorageUnavailable(f"{call.subject}: the bytes that arrived have another checksum")
        return data, info

    async def get_range(self, key: str, *, position: int, size_bytes: int) -> bytes:
        """Return the bytes of a range in one request."""
        if size_bytes == 0:
            await self.head(key)
            return b""
        call = Call("get_range", self._bucket, key)
        last = position + size_bytes - 1
        try:
            with translated(call):
                answer = await self._client.get_object(
                    Bucket=self._bucket, Key=self._prefix + key, Range=f"bytes={position}-{last}"
                )
                data = await _read_whole(call, answer)
        except StorageError as error:
            if _status(error) == 416:  # noqa: PLR2004 - "Range Not Satisfiable": it begins past the end
                return b""
            raise
        # A server may answer with the whole object instead.
        return data if answer.get("ContentRange") else data[position : position + size_bytes]

    async def head(self, key: str) -> ObjectInfo:
        """Return an object's size, version and checksum."""
        call = Call("head", self._bucket, key)
        try:
            with translated(call):
                answer = await self._client.head_object(
                    Bucket=self._bucket, Key=self._prefix + key, ChecksumMode="ENABLED"
                )
        except ObjectNotFound:
            # An answer to HEAD has no body, hence no code that tells a missing object from a missing bucket.
            await self._require_bucket(call)
            raise
        return _info(key, answer, size_bytes=answer["ContentLength"])

    async def _require_bucket(self, call: Call) -> None:
        try:
            with translated(call):
                await self._client.head_bucket(Bucket=self._bucket)
        except ObjectNotFound as error:
            raise bucket_not_found(call) from error

    async def list_page(self, prefix: str, *, start_after: str | None = None, limit: int = 1000) -> ListPage:
        """Return one page of ListObjectsV2."""
        parameters: dict[str, Any] = {
            "Bucket": self._bucket,
            "Prefix": self._prefix + prefix,
            "MaxKeys": limit,
        }
        if start_after is not None:
            parameters["StartAfter"] = self._prefix + start_after
        with translated(Call(f"list {prefix}*", self._bucket)):
            answer = await self._client.list_objects_v2(**parameters)
        objects = tuple(
            ObjectInfo(
                entry["Key"].removeprefix(self._prefix),
                entry["Size"],
                entry["ETag"],
                None,
                _milliseconds(entry["LastModified"]),
            )
            for entry in answer.get("Contents", ())
        )
        has_more = answer["IsTruncated"] and bool(objects)
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
        with translated(call):
            answer = await self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        errors = [each for each in answer.get("Errors", ()) if each.get("Code") != "NoSuchKey"]
        if errors:
            first = errors[0]
            call.key = first["Key"].removeprefix(self._prefix)
            error = from_answer(call, {"Error": first})
            error.hint = f"{len(errors)} of {len(keys)} objects were refused; {error.hint or 'try again'}"
            raise error

    async def close(self) -> None:
        """Close the connections."""
        await self._resources.aclose()


def _config(settings: S3Settings) -> AioConfig:
    return AioConfig(
        connect_timeout=settings.connect_timeout_seconds,
        read_timeout=settings.read_timeout_seconds,
        max_pool_connections=settings.max_connections,
        connector_args={"keepalive_timeout": settings.max_idle_seconds},
        retries={"total_max_attempts": 1, "mode": "standard"},
        # The settings say where the store is; AWS_ENDPOINT_URL in some environment does not.
        ignore_configured_endpoint_urls=True,
        # Integrity is the CRC32C that each call brings. The SDK's defaults would hash every body again,
        # with SHA-256 and on the loop's thread.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        parameter_validation=False,
        user_agent=_USER_AGENT,
        s3={
            "addressing_style": "path" if settings.url_style == "path" else "virtual",
            "payload_signing_enabled": False,
        },
    )


def _condition_parameters(condition: Condition | None) -> dict[str, str]:
    if condition is None:
        return {}
    return {"IfNoneMatch": "*"} if isinstance(condition, IfAbsent) else {"IfMatch": condition.version}


async def _read_whole(call: Call, answer: dict[str, Any]) -> bytes:
    """Read an answer's body, and refuse one that ended early."""
    async with answer["Body"] as stream:
        data: bytes = await stream.read()
    if len(data) != answer["ContentLength"]:
        raise StorageUnavailable(
            f"{call.subject}: {len(data)} bytes arrived of {answer['ContentLength']} announced"
        )
    return data


def _info(key: str, answer: dict[str, Any], *, size_bytes: int) -> ObjectInfo:
    checksum = _decode_crc32c(answer.get("ChecksumCRC32C"), answer.get("ChecksumType"))
    return ObjectInfo(key, size_bytes, answer["ETag"], checksum, _milliseconds(answer["LastModified"]))


def _encode_crc32c(value: int) -> str:
    return base64.b64encode(value.to_bytes(4, "big")).decode()


def _decode_crc32c(text: str | None, kind: str | None) -> int | None:
    """Return a checksum of the whole object; one composed of its parts' checksums says nothing to us."""
    if text is None or "-" in text or kind == "COMPOSITE":
        return None
    return int.from_bytes(base64.b64decode(text), "big")


def _milliseconds(moment: Any) -> int:
    return int(moment.timestamp() * 1000)


def _answered_at_ms(answer: dict[str, Any]) -> int:
    """Return the server's clock where it tells (a PUT's answer has no modification time), else ours."""
    date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
    return _milliseconds(parsedate_to_datetime(date)) if date else time.time_ns() // 1_000_000


def _status(error: StorageError) -> int:
    answer = getattr(error.__cause__, "response", {})
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
