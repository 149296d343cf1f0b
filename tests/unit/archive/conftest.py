"""One partition's log and one bucket, as the tests of services have them."""

from tests.fakes.fixtures import archive, clock, store, writer

__all__ = ["archive", "clock", "store", "writer"]
