"""The shared fixtures that tests of `space` ask for."""

from tests.fakes.fixtures import clock, metrics, store, writers

__all__ = ["clock", "metrics", "store", "writers"]
