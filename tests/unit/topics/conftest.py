"""The shared fixtures that tests of `topics` ask for."""

from tests.fakes.fixtures import archive, broker, clock, store, writer

__all__ = ["archive", "broker", "clock", "store", "writer"]
