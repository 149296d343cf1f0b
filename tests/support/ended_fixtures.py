"""
A pytest plugin that ends shared brokers, servers and sessions when a worker has come to tests without them.

An idle broker takes 3 % of a core, and pytest keeps a session's fixtures until the end of all tests. This
plugin ends one before the first test of a group in which no test uses it. A later test that uses it all the
same starts it again.
"""

from __future__ import annotations

from typing import Any, Final

import pytest

from tests.support.suite_report import WITH_PROCESSES, resource_group

_BY_GROUP: Final = ("behind", "second_kafka", "brokers", "guarded", "spark")
"""Fixtures that are used by whole groups of tests."""
_BY_FOLDER: Final = ("kafka", "seaweedfs")
"""Fixtures that nearly all tests with processes use."""
_USERS: Final = pytest.StashKey[dict[str, set[str]]]()
_BEGUN: Final = pytest.StashKey[list[tuple[Any, Any]]]()
"""The definitions of fixtures that were set up, each with its request."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note which groups use each fixture."""
    users: dict[str, set[str]] = {name: set() for name in _BY_GROUP}
    for item in session.items:
        for name in users.keys() & set(getattr(item, "fixturenames", ())):
            users[name].add(resource_group(item.nodeid))
    session.stash[_USERS], session.stash[_BEGUN] = users, []


@pytest.hookimpl(trylast=True)
def pytest_fixture_post_finalizer(fixturedef: Any, request: Any) -> None:
    """Forget a fixture that has ended."""
    begun = request.session.stash.get(_BEGUN, [])
    begun[:] = [one for one in begun if one[0] is not fixturedef]


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> None:
    """Note a fixture that this plugin may end."""
    if fixturedef.scope == "session" and fixturedef.argname in {*_BY_GROUP, *_BY_FOLDER}:
        request.session.stash[_BEGUN].append((fixturedef, request))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """End what the tests of this one's group do not use."""
    group = resource_group(item.nodeid)
    ended = {name for name, groups in item.session.stash[_USERS].items() if group not in groups}
    if not item.nodeid.startswith(WITH_PROCESSES):
        ended.update(_BY_FOLDER)
    for fixture, request in list(item.session.stash[_BEGUN]):
        is_below = bool(fixture.baseid) and item.nodeid.startswith(fixture.baseid)
        if fixture.argname in ended and not is_below:
            # The fixtures that depend on it end with it. All of them start anew when they are used.
            fixture.finish(request)
