"""The shared fixtures that tests of `archiving` ask for."""

from tests.fakes.fixtures import archive, broker, clock, daemon, metrics, store, writer, writers

__all__ = ["archive", "broker", "clock", "daemon", "metrics", "store", "writer", "writers"]
