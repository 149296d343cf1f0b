"""A store whose process ends at one of its requests."""

from __future__ import annotations


class Killed(BaseException):
    """What ends a process: nothing handles it."""


class Dying:
    """A store that ends its process at the n-th request, before or after its effect."""

    def __init__(self, store, dies_at: int, *, after_effect: bool):
        self.store = store
        self.left = dies_at
        self.after_effect = after_effect

    def __getattr__(self, name):
        method = getattr(self.store, name)

        async def call(*arguments, **options):
            self.left -= 1
            # Others may be under way beside it.
            is_last = self.left == 0
            if is_last and not self.after_effect:
                raise Killed
            try:
                return await method(*arguments, **options)
            finally:
                # Also after a request that the store has refused.
                if is_last:
                    raise Killed

        return call
