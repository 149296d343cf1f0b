"""
Questions to the broker that come again in each round, mostly with the same answer.

A round asks for the metadata, the settings and the bounds of ten thousand partitions. Nearly always it asks
what the round before asked, and the broker answers with the same bytes. Building such a request and reading
such an answer took a quarter of an idle daemon's CPU. So a question keeps its request as bytes, and what it
has read from its last answer. An answer is read again unless it is the last one byte for byte, in the same
version of the message: what is kept is what would be read. The broker is asked all the same.

The bytes are compared by their length and a hash of 32 bytes: the answers of many brokers would take much
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tieringd.broker.kafka_protocol import ApiVersionRange, KafkaRequest

if TYPE_CHECKING:
    from types import ModuleType

_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class _KeptAnswer(Generic[_Read]):
    """What was read from an answer."""

    version: int
    size_bytes: int
    digest: bytes
    value: _Read


class KeptQuestion(Generic[_Read]):
    """
    A question that is asked again and again.

    *read* takes kio's response, and its result must follow from the response alone. The result is shared by
    all that get it, so it must not be changed. What *read* raises is not kept.
    """

    def __init__(
        self,
        api: ApiVersionRange,
        build: Callable[[ModuleType], Any],
        read: Callable[[Any], _Read],
    ) -> None:
        self.api = api
        self.build = build
        self._read = read
        self._request: tuple[int, bytes] | None = None
        self._answer: _KeptAnswer[_Read] | None = None

    def request(self) -> KafkaRequest:
        """
        Return a request to send once. Its response is what *read* returns.

        The response to an unchanged answer is the same object as before.
        """
        return _KeptRequest(self)

    def body(self, version: int, encode: Callable[[], bytes]) -> bytes:
        """Return the message in this version, from *encode* where it is not kept."""
        if self._request is None or self._request[0] != version:
            self._request = version, encode()
        return self._request[1]

    def value(self, version: int, data: bytes, decode: Callable[[], Any]) -> _Read:
        """Return what *read* makes of an answer of this version; *decode* gives the response in it."""
        kept, digest = self._answer, blake2b(data, digest_size=32).digest()
        if kept is None or (kept.version, kept.size_bytes, kept.digest) != (version, len(data), digest):
            kept = self._answer = _KeptAnswer(version, len(data), digest, self._read(decode()))
        return kept.value


class _KeptRequest(KafkaRequest):
    """One request of a kept question. Each has a version of its own: two brokers may differ in theirs."""

    def __init__(self, question: KeptQuestion[Any]) -> None:
        super().__init__(question.api, question.build)
        self._question = question

    def encode(self) -> bytes:
        return self._question.body(self.version, super().encode)

    def decoded(self, answer: bytes) -> Any:
        decode = super().decoded
        return self._question.value(self.version, answer, lambda: decode(answer))
