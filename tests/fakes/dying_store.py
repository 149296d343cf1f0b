"""A store that simulates the end of the process at one of its requests."""

from __future__ import annotations


class Killed(BaseException):
    """Simulates the end of the process. No code handles this exception."""


class Dying:
    """A store that raises `Killed` at its n-th request, before or after the effect."""

    def __init__(self, store, dies_at: int, *, after_effect: bool):
        self.store = store
        self.left = dies_at
        self.after_effect = after_effect

    def __getattr__(self, name):
        method = getattr(self.store, name)

        async def call(*arguments, **options):
            self.left -= 1
            # Other requests may be under way, and decrement `left` as well.
            is_last = self.left == 0
            if is_last and not self.after_effect:
                raise Killed
            try:
                return await method(*arguments, **options)
            finally:
                # In `finally`, so that the process also ends after a request that the store refused.
                if is_last:
                    raise Killed

        return call
