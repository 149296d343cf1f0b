"""
The scrub at the end of each end-to-end test: what a test has archived is whole, and has nothing too much.

It goes over every archive of which the test has written a configuration, in this process, through the
library: a shallow one, which asks for each object. Daemons may still run beside it. A test that leaves damage
behind on purpose says so with `@pytest.mark.leaves_damage("why")`.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.daemon import endpoint_properties, written_configs
from tieringd.config import parse_config
from tieringd.daemon.archive import opened_archive
from tieringd.daemon.scrubbing import scrub_parts
from tieringd.errors import BucketNotFound, ConfigError, StorageDenied
from tieringd.housekeeping.scrub import WholeScrub

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Mapping

    from tieringd.config import Config

MARK = "leaves_damage"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, with its meaning."""
    config.addinivalue_line("markers", f"{MARK}(why): the test leaves an archive with faults, on purpose")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget the configurations of the tests before. Those of this test's fixtures count."""
    written_configs.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Scrub what the test has archived, while its servers still run."""
    if "tests/e2e/" not in item.nodeid:
        return (yield)
    result = yield
    if item.get_closest_marker(MARK) is None:
        fixtures: Mapping[str, Any] = getattr(item, "funcargs", {})
        faults = faults_of(written_configs, s3_url=getattr(fixtures.get("seaweedfs"), "endpoint_url", None))
        assert not faults, "a scrub at the end of the test found:\n" + "\n".join(faults)
    return result


def faults_of(configs: Iterable[Mapping[str, Any]], *, s3_url: str | None) -> list[str]:
    """
    Scrub each archive of *configs* once, and return what was found.

    *s3_url* is the address of the S3 server: a test may reach it through a proxy that has ended.
    """
    places = {_place(one): one for one in configs}
    found: list[str] = []
    # A test may have a loop of its own in this thread.
    with ThreadPoolExecutor(1) as pool:
        for place, one in places.items():
            config = _config(one, s3_url)
            if config is not None:
                faults = pool.submit(asyncio.run, _faults(config)).result()
                found += [f"{place}: {fault}" for fault in faults]
    return found


def _place(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("backend", "file_root", "bucket", "azure_container", "prefix")
    return tuple(str(config.get(f"cloud_storage_{name}", "")) for name in names)


def _config(written: Mapping[str, Any], s3_url: str | None) -> Config | None:
    """Return the configuration; None where nothing can have been archived with it."""
    changes = endpoint_properties(s3_url) if s3_url and written.get("cloud_storage_backend") == "aws" else {}
    try:
        config = parse_config(yaml.safe_dump(dict(written) | changes), source="test", environ={})
    except ConfigError:
        return None
    root = config.cloud_storage_file_root
    return None if root is not None and not Path(root).is_dir() else config


async def _faults(config: Config) -> list[str]:
    async with opened_archive(config) as archive:
        parts = scrub_parts(config, archive, writer_id="scrub", local_log=lambda _: None)
        try:
            report = await WholeScrub(parts, archive.store, archive.manifests).run(deep=False, fix=False)
        except (BucketNotFound, StorageDenied):
            # With such a configuration nothing was archived either.
            return []
    return [
        *(f"{one.kind}: {one}" for one in report.findings),
        *(f"orphan: {one.stored.key}: {one.detail}" for one in report.orphans),
        *(f"{partition} cannot be judged: {why}" for partition, why in report.uncertain.items()),
    ]
