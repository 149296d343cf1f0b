"""One budget for all bytes that connections of a gateway hold in memory."""

from __future__ import annotations


class ByteBudget:
    """
    Count bytes against a limit.

    What can be avoided asks first (`take`); what is already there is counted anyway (`add`), and
    is bounded per connection, because nothing more is read for one whose peer does not take it.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    @property
    def is_spent(self) -> bool:
        """Say whether nothing is left."""
        return self.used >= self.limit

    def take(self, size: int) -> bool:
        """Count *size* bytes if they fit, and say whether they did."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def add(self, size: int) -> None:
        """Count *size* bytes, whether they fit or not."""
        self.used += size

    def give(self, size: int) -> None:
        """Give *size* bytes back."""
        self.used -= size
