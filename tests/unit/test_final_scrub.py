"""The scrub at the end of end-to-end tests sees damage, and fails the test that left it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.daemon import directory_config, write_config, written_configs
from tests.support.final_scrub import faults_of, pytest_runtest_call
from tests.unit.cli.commands import make_site, tieringd


@pytest.fixture
def archived(tmp_path):
    """Give an archive of two segments."""
    site = make_site(tmp_path)
    assert tieringd("run", "--once", "--config", site.config).exit_code == 0
    return site


def config_of(site):
    return directory_config([site.root / "logs"], site.archive, site.root / "state")


def test_sound_archive_has_no_fault(archived):
    """A directory that was never an archive has none either, nor has a configuration that is refused."""
    nowhere = directory_config([archived.root / "logs"], archived.root / "none", archived.root / "state")
    assert faults_of([config_of(archived), nowhere, {"cloud_storage_backend": "none"}], s3_url=None) == []


@pytest.mark.parametrize("pattern", ["*.log", "*.index", "manifest"])
def test_missing_object_is_a_fault(archived, pattern):
    """A missing object of any kind is a fault, which names its key."""
    gone = archived.objects(pattern)[0]
    gone.unlink()
    faults = faults_of([config_of(archived)], s3_url=None)
    assert any(gone.name in fault for fault in faults)


def run(item, body) -> None:
    """Do what pytest does with the hook around a test."""
    steps = pytest_runtest_call(item)
    next(steps)
    body()
    with pytest.raises(StopIteration):
        steps.send(None)


@pytest.mark.parametrize("is_marked", [True, False])
def test_end_to_end_test_that_leaves_damage_fails(archived, is_marked):
    """The test passes if it says why it leaves damage."""
    written_configs.clear()
    item = SimpleNamespace(
        nodeid="tests/e2e/test_some.py::test_some",
        funcargs={},
        get_closest_marker=lambda _: is_marked or None,
    )

    def body() -> None:
        write_config(archived.root / "again.yaml", config_of(archived))
        archived.objects("*.log")[0].unlink()

    if is_marked:
        run(item, body)
    else:
        with pytest.raises(AssertionError, match="data_missing"):
            run(item, body)


def test_other_tests_are_left_alone(archived):
    """A test of one unit may write what it likes."""
    run(SimpleNamespace(nodeid="tests/unit/test_some.py::test_some"), lambda: None)
