"""The shared fixtures that tests of `endpoint` ask for."""

from tests.fakes.fixtures import archive, clock, store, writer

__all__ = ["archive", "clock", "store", "writer"]
