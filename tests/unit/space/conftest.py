"""The shared fixtures that tests of `space` ask for."""

from tests.fakes.fixtures import archive, clock, metrics, store, writer, writers

__all__ = ["archive", "clock", "metrics", "store", "writer", "writers"]
