"""One small archive for all commands that only look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.unit.cli.commands import make_site, tieringd

if TYPE_CHECKING:
    import pathlib

    from tests.unit.cli.commands import Site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Return an archived log; tests leave it as it is."""
    made = make_site(tmp_path_factory.mktemp("site"))
    done = tieringd("run", "--once", "--config", made.config)
    assert (done.exit_code, done.output) == (0, ""), done.errors
    return made


@pytest.fixture
def own_site(tmp_path: pathlib.Path) -> Site:
    """Return a log that is not archived yet, for a test that changes things."""
    return make_site(tmp_path)
