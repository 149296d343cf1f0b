"""One partition's log and one bucket, as the tests of services have them."""

from tests.unit.services.conftest import archive, clock, metrics, store, writer

__all__ = ["archive", "clock", "metrics", "store", "writer"]
