"""
The exception tree: one class for each thing a caller may do about an error.

TieringError
├── ConfigError               the operator must change the configuration
├── RetryableError            nothing is wrong with our data; try again later
│   ├── StorageUnavailable    timeouts, 5xx, throttling
│   │   └── ManifestEdited    a job edited the manifest before a commit: read it again
│   ├── BrokerUnavailable     no answer, or "not leader", or "not ready"
│   │   └── LeadershipChanged the broker leads under another epoch than the caller acts under
│   └── LocalFileError        a file or directory that cannot be read now
├── StorageError              the store answered, and the answer is final
│   ├── ObjectNotFound
│   ├── PreconditionFailed    a conditional write lost
│   ├── ChecksumRejected      the bytes that arrived are not the bytes announced
│   ├── StorageDenied         credentials or policy
│   ├── BucketNotFound
│   ├── StoreFull             no room on the file store's disk
│   └── ObjectTooLarge        an object of its kind may not be so large
├── BrokerDenied              the broker refuses an operation for good
│   └── BrokerLacksApi        the broker does not offer the request
├── FencedError               another writer owns the partition: stop, do not retry
│   ├── ManifestRemoved       the manifest was there, and is gone
│   └── RivalWriter           another process writes under the same leader epoch
├── DataLossError             records that a reader asked for are not in the archive
├── ProtocolViolation         a peer sent what is no Kafka message: close its connection
└── CorruptDataError          CRC, length or order is wrong: quarantine, never retry
    └── UnpackedTooLarge      records that unpack to more than the caller takes

Foreign exceptions (SDK, HTTP, Kafka client) are translated where they arise, with
``raise ... from``; none is visible above ``storage`` and ``broker``. Retrying is decided by
class, in ``storage.resilient`` for calls and in a service's ``run()`` for steps.
"""

from __future__ import annotations

from typing import Final, Self


class TieringError(Exception):
    """The base of every error this package raises on purpose."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}. {self.hint}" if self.hint else self.message


class ConfigError(TieringError):
    """
    The configuration is wrong; every fault is in *problems*, one line each.

    Nothing has been started and nothing changed when this is raised.
    """

    def __init__(self, message: str, *, problems: tuple[str, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = problems


class RetryableError(TieringError):
    """Nothing is wrong with our data: the same call may succeed later."""


class StorageUnavailable(RetryableError):
    """
    The object store timed out, failed or throttled.

    *outcome_unknown* is true when a write may have taken effect all the same: the caller
    must look before it writes again. *is_throttling* is true when the store asked for fewer requests.
    """

    def __init__(
        self,
        message: str,
        *,
        retry_after_seconds: float | None = None,
        outcome_unknown: bool = False,
        is_throttling: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_seconds = retry_after_seconds
        self.outcome_unknown = outcome_unknown
        self.is_throttling = is_throttling


class ManifestEdited(StorageUnavailable):
    """A job edited the manifest before this commit. Nothing failed: the next use reads the manifest again."""


class BrokerUnavailable(RetryableError):
    """The broker did not answer, or is not ready to answer this."""


class LeadershipChanged(BrokerUnavailable):
    """The broker does not lead the partition under the call's leader epoch: ask for the leader again."""


class LocalFileError(RetryableError):
    """A local file or directory could not be read; *path* names it."""

    def __init__(self, message: str, *, path: str, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.path = path


class StorageError(TieringError):
    """The object store gave a final answer; *key* names the object, if there is one."""

    def __init__(self, message: str, *, key: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.key = key


class ObjectNotFound(StorageError):
    """No object has this key."""


class PreconditionFailed(StorageError):
    """A conditional write lost: the object exists, is absent, or has another version."""


class ChecksumRejected(StorageError):
    """The store received other bytes than the checksum announced; nothing was stored."""


class StorageDenied(StorageError):
    """
    The credentials are wrong, or do not allow this operation.

    *may_pass* says that the refusal may end without a change to the configuration: this machine's clock is
    wrong, or a service issues no credentials to it yet. Both are usual in the first seconds after a boot.
    """

    def __init__(
        self, message: str, *, key: str | None = None, hint: str | None = None, may_pass: bool = False
    ) -> None:
        super().__init__(message, key=key, hint=hint)
        self.may_pass = may_pass


class BucketNotFound(StorageError):
    """The bucket (or the file store's root) does not exist."""


class StoreFull(StorageError):
    """The file store's disk has no room left; nothing was stored under the key."""


class ObjectTooLarge(StorageError):
    """An object would have more bytes than its kind may have; nothing was stored."""


STORE_FAULTS: Final = (StorageUnavailable, StorageDenied, BucketNotFound, StoreFull)
"""What a whole store suffers from, and not one partition's objects."""


class BrokerDenied(TieringError):
    """The broker refuses an operation for good: permission, or the kind of topic."""


class BrokerLacksApi(BrokerDenied):
    """The broker does not offer a request, or no version of it that tieringd knows."""


class FencedError(TieringError):
    """Another writer owns the partition's manifest: this archiver stops, and does not retry."""


class ManifestRemoved(FencedError):
    """
    The partition's manifest was deleted from the bucket.

    No writer may begin anew: the segments that it named still exist.
    """


class RivalWriter(FencedError):
    """
    Another process has committed to the manifest under the same leader epoch.

    One such commit may be the last request of a process that has ended, on its way until now. A second one
    is of a process that lives: see `archiving.claim`. *writer_id* and *commit_number* tell commits apart.
    """

    def __init__(
        self, message: str, *, writer_id: str = "", commit_number: int = 0, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.writer_id = writer_id
        self.commit_number = commit_number


class DataLossError(TieringError):
    """Records that a reader asked for are not in the archive, and it did not say that this is all right."""


class ProtocolViolation(TieringError):
    """A client or broker sent bytes that are no Kafka message; only its own connection pays for it."""


class CorruptDataError(TieringError):
    """
    Stored bytes are wrong. Never retried; the partition is quarantined and reported.

    *source* is a file or an object key, *position* a byte position in it, *offset* the
    nearest known Kafka offset. Each is None when it is not known.
    """

    def __init__(
        self,
        message: str,
        *,
        source: str | None = None,
        position: int | None = None,
        offset: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.source = source
        self.position = position
        self.offset = offset

    def __str__(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("in", self.source), ("position", self.position), ("offset", self.offset))
            if value is not None
        ]
        text = super().__str__()
        return f"{text} ({', '.join(places)})" if places else text

    def located(self, source: str) -> Self:
        """
        Return the same fault with *source* named, for a caller that knows the file or object.

        The error keeps its class.
        """
        return type(self)(
            self.message, source=source, position=self.position, offset=self.offset, hint=self.hint
        )


class UnpackedTooLarge(CorruptDataError):
    """The records of a batch unpack to more bytes than the caller takes. They may be valid."""
