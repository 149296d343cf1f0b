"""Work on many topics: a topic that fails does not keep the others from their turn."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from tieringd.errors import STORE_FAULTS, RetryableError, TieringError
from tieringd.formats.object_keys import TopicKey


class TopicFaults(TieringError):
    """Some topics failed, each with its own error in *faults*. *done* counts the topics that succeeded."""

    def __init__(self, faults: Mapping[TopicKey, TieringError], *, done: int) -> None:
        super().__init__("; ".join(f"topic {key.topic}: {error}" for key, error in faults.items()))
        self.faults = faults
        self.done = done


async def each_topic(topics: Iterable[TopicKey], act: Callable[[TopicKey], Awaitable[None]]) -> None:
    """
    Call *act* for one topic after another, also after one that fails.

    Raises:
        TopicFaults: After the last topic: these failed.
        RetryableError: At once. The store or the broker is away, so the other topics would fail as well.
        StorageError: At once, one of `STORE_FAULTS`: the whole store refuses.
    """
    faults: dict[TopicKey, TieringError] = {}
    done = 0
    for key in topics:
        try:
            await act(key)
        except (RetryableError, *STORE_FAULTS):
            raise
        except TieringError as error:
            faults[key] = error
        else:
            done += 1
    if faults:
        raise TopicFaults(faults, done=done)
