"""A bucket with a plain, blocking S3 client, for set-up and checks that bypass the store under test."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Self

from tests.support.seaweedfs import s3_client

if TYPE_CHECKING:
    from types import TracebackType


def answers(host: str, port: int) -> bool:
    """Return whether a server accepts connections at *host* and *port*."""
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


class S3Bucket:
    """The objects below one prefix of a bucket."""

    def __init__(self, endpoint_url: str, *, bucket: str, prefix: str) -> None:
        self._client = s3_client(endpoint_url)
        self._bucket = bucket
        self._prefix = prefix

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def create(self) -> None:
        """Create the bucket."""
        self._client.create_bucket(Bucket=self._bucket)

    def read(self, key: str) -> bytes | None:
        """Return an object's bytes; None if it does not exist."""
        try:
            answer = self._client.get_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")
        except self._client.exceptions.NoSuchKey:
            return None
        with answer["Body"] as stream:
            return stream.read()

    def keys(self) -> list[str]:
        """Return the keys of all objects below the prefix."""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=f"{self._prefix}/"
        )
        found = [each["Key"] for page in pages for each in page.get("Contents", ())]
        return sorted(key.removeprefix(f"{self._prefix}/") for key in found)

    def write(self, key: str, data: bytes) -> None:
        """Store an object."""
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}", Body=data)

    def delete(self, key: str) -> None:
        """Delete an object."""
        self._client.delete_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}")
