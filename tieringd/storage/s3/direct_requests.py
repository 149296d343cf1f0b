"""
PUT, HEAD and GET of one object without the SDK's work for each request.

The SDK takes half a millisecond of the loop's processor for a request: events, endpoint rules, serialising
and parsing. These three operations are nearly all requests of a daemon, and their form is always the same.
So the first of them goes through the SDK, and shows where the SDK sends it and how it signs it. Those that
follow are sent in the same form. Session, connection pool, signer, credentials and error documents stay the
SDK's.

The SDK sends every request itself where its own first one has another form than expected, such as the session
token of a directory bucket. It also sends again what a server refused because of its region: nothing was done
then, and the SDK finds the right region.
"""

from __future__ import annotations

import io
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from aiobotocore.response import StreamingBody
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser
from botocore.utils import percent_encode

from tieringd.storage.s3.client import parsed_time

if TYPE_CHECKING:
    from aiobotocore.httpsession import AIOHTTPSession

_METHODS: Final = {"PutObject": "PUT", "HeadObject": "HEAD", "GetObject": "GET"}
_HEADERS: Final[Mapping[str, str]] = {
    "ChecksumCRC32C": "x-amz-checksum-crc32c",
    "ChecksumMode": "x-amz-checksum-mode",
    "IfMatch": "If-Match",
    "IfNoneMatch": "If-None-Match",
    "Range": "Range",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
}
"""The header of each parameter that `S3Store` passes to the three operations."""
_TEXT_FIELDS: Final[Mapping[str, str]] = {
    "ETag": "etag",
    "ChecksumCRC32C": "x-amz-checksum-crc32c",
    "ChecksumType": "x-amz-checksum-type",
    "ContentRange": "content-range",
}
"""The header of each field that `S3Store` reads from the responses."""
_LARGE_BYTES: Final = 1 << 20
_METADATA: Final = "x-amz-meta-"
_SAFE_IN_KEYS: Final = "/~"
"""The SDK escapes all other characters of a key, but for letters, digits and `-._`."""
_ALGORITHM: Final = "AWS4-HMAC-SHA256"
_UNSIGNED: Final = "UNSIGNED-PAYLOAD"
_SERVICE: Final = "s3"
_SCOPE_PARTS: Final = 5
"""Access key, day, region, service and a constant."""
_REDIRECTED_FROM: Final = 300
_OTHER_REGION_CODES: Final = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}


@dataclass(frozen=True, slots=True)
class Form:
    """How the SDK sends a request for an object of one bucket."""

    base_url: str
    """Everything before the escaped key."""
    region: str
    """The region in the signature."""

    @classmethod
    def of(cls, request: AWSPreparedRequest, key: str) -> Form | None:
        """Return the form of a request for *key* that the SDK has signed; None if it is not the usual one."""
        escaped = percent_encode(key, safe=_SAFE_IN_KEYS)
        headers = request.headers
        algorithm, _, rest = _text(headers.get("Authorization")).partition(" ")
        scope = rest.partition(",")[0].removeprefix("Credential=").rsplit("/", _SCOPE_PARTS - 1)
        is_usual = (
            algorithm == _ALGORITHM
            and len(scope) == _SCOPE_PARTS
            and scope[3] == _SERVICE
            and _text(headers.get("X-Amz-Content-SHA256")) == _UNSIGNED
            and request.url.endswith(f"/{escaped}")
        )
        return cls(request.url.removesuffix(escaped), scope[2]) if is_usual else None


class DirectRequests:
    """
    Sends the three operations for the objects of one bucket, with the SDK's names and response fields.

    It knows the parameters that `S3Store` uses.

    Args:
        client: The SDK's client.
        session: Returns the HTTP session that the SDK has built for the client.
        credentials: Returns what to sign with.
        user_agent: The header with which the SDK's requests begin.
        note_headers: Called with the headers of each response, errors included.
    """

    def __init__(
        self,
        client: Any,
        *,
        session: Callable[[], AIOHTTPSession],
        credentials: Callable[[], Awaitable[Any]],
        user_agent: str,
        note_headers: Callable[[Mapping[str, str]], None],
    ) -> None:
        self._client = client
        self._session = session
        self._credentials = credentials
        self._user_agent = user_agent
        self._note_headers = note_headers
        self._form: Form | None = None
        self._is_unusual = False
        self._key_in_progress: ContextVar[str | None] = ContextVar("key_in_progress", default=None)
        self._parser = create_parser("rest-xml")
        self._through_sdk: Mapping[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            "PutObject": client.put_object,
            "HeadObject": client.head_object,
            "GetObject": client.get_object,
        }
        for operation in _METHODS:
            client.meta.events.register(f"before-send.{_SERVICE}.{operation}", self._observe)

    async def put_object(self, **parameters: Any) -> dict[str, Any]:
        """Store an object; `Body` is bytes or a `FileBody`. Errors are those of `get_object`."""
        return await self._request("PutObject", parameters)

    async def head_object(self, **parameters: Any) -> dict[str, Any]:
        """Return the fields of an object's headers. Errors are those of `get_object`."""
        return await self._request("HeadObject", parameters)

    async def get_object(self, **parameters: Any) -> dict[str, Any]:
        """
        Return the fields of an object's headers, and its body as a stream.

        Raises:
            ClientError: The server refused.
            BotoCoreError: There is no whole response.
            TieringError: There are no credentials of a role.
        """
        return await self._request("GetObject", parameters)

    async def _request(self, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        if self._form is not None:
            answer = await self._send(self._form, operation, **parameters)
            if answer is not None:
                return answer
        token = self._key_in_progress.set(parameters["Key"])
        try:
            return await self._through_sdk[operation](**parameters)
        finally:
            self._key_in_progress.reset(token)

    def _observe(self, request: AWSPreparedRequest, **_: Any) -> None:
        """Learn the form from a request that the SDK is about to send. The last such request counts."""
        key = self._key_in_progress.get()
        if key is not None and not self._is_unusual:
            self._form = Form.of(request, key)
            self._is_unusual = self._form is None

    async def _send(
        self,
        form: Form,
        operation: str,
        *,
        Bucket: str,  # noqa: N803, ARG002 - the form has it
        Key: str,  # noqa: N803
        Body: Any = None,  # noqa: N803
        **parameters: str,
    ) -> dict[str, Any] | None:
        """Send a request in *form*. Return None if the server is in another region: nothing was done then."""
        url = form.base_url + percent_encode(Key, safe=_SAFE_IN_KEYS)
        headers = {_HEADERS[name]: value for name, value in parameters.items()}
        headers["User-Agent"] = self._user_agent
        request = AWSRequest(_METHODS[operation], url, headers=headers)
        # The signer asks the configuration whether to hash the payload. Ours says no.
        request.context["client_config"] = self._client.meta.config
        _Signer(await self._credentials(), _SERVICE, form.region).add_auth(request)
        if Body is not None:
            request.headers["Content-Length"] = str(len(Body))
            if isinstance(Body, bytes) and len(Body) > _LARGE_BYTES:
                # In one piece they would hold up the loop.
                Body = io.BytesIO(Body)  # noqa: N806
        is_read = operation == "GetObject"
        prepared = AWSPreparedRequest(request.method, url, request.headers, Body, stream_output=is_read)
        response = await self._session().send(prepared)
        self._note_headers(response.raw.headers)
        if response.status_code < _REDIRECTED_FROM:
            return _fields(response, is_read=is_read)
        parsed = self._parser.parse(
            {
                "status_code": response.status_code,
                "headers": response.headers,
                "body": await response.content,
            },
            None,
        )
        is_redirect = response.status_code < HTTPStatus.BAD_REQUEST
        if is_redirect or parsed["Error"].get("Code") in _OTHER_REGION_CODES:
            self._form = None
            return None
        raise ClientError(parsed, operation)


class _Signer(S3SigV4Auth):  # type: ignore[misc]
    """The SDK's signer for one request. It asks twice which headers to sign, and gets the answer of once."""

    _chosen: Any = None

    def headers_to_sign(self, request: AWSRequest) -> Any:
        """Return the headers to sign."""
        if self._chosen is None:
            self._chosen = super().headers_to_sign(request)
        return self._chosen


def _fields(response: Any, *, is_read: bool) -> dict[str, Any]:
    """Return the fields of a response that `S3Store` reads."""
    # Those of aiohttp: a look-up in the SDK's own mapping makes an object, and takes ten times as long.
    headers = response.raw.headers
    fields: dict[str, Any] = {
        name: headers[header] for name, header in _TEXT_FIELDS.items() if header in headers
    }
    if "last-modified" in headers:
        fields["LastModified"] = _time(headers["last-modified"])
    if "content-length" in headers:
        fields["ContentLength"] = int(headers["content-length"])
    fields["Metadata"] = {
        name.lower().removeprefix(_METADATA): value
        for name, value in headers.items()
        if name.lower().startswith(_METADATA)
    }
    if is_read:
        fields["Body"] = StreamingBody(response.raw, headers.get("content-length"))
    fields["ResponseMetadata"] = {"HTTPStatusCode": response.status_code, "HTTPHeaders": headers}
    return fields


def _time(text: str) -> datetime:
    """Return the time in a header: in HTTP's form, or in one that the SDK reads as well."""
    try:
        return parsedate_to_datetime(text)
    except ValueError:
        return parsed_time(text)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value or "")
