"""Source and jobs on the stores of Google and Azure: executors reach them by the same configuration."""

# Long: every job runs on Spark, once for each cloud.

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import ExitStack, contextmanager

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.e2e.archives import read_records
from tests.e2e.log_files import RECORDS, write_partition
from tests.e2e.spark.keyed_topics import archive_once, assert_sound
from tests.e2e.spark.rows import frame, seen_in
from tests.support.azurite import running_azurite
from tests.support.daemon import azure_properties, directory_config, endpoint_properties, write_config
from tests.support.fake_gcs import running_fake_gcs
from tests.support.gcs_token_endpoint import ACCOUNT, GcsTokenEndpoint
from tests.support.raw_http import serving
from tieringd.config import load_config
from tieringd.spark.jobs.compact import compact
from tieringd.spark.jobs.erase import erase
from tieringd.spark.jobs.export.job import export
from tieringd.spark.jobs.export.parquet_target import ParquetTarget
from tieringd.spark.jobs.merge import merge
from tieringd.spark.jobs.rebuild import rebuild
from tieringd.spark.jobs.scrub import scrub
from tieringd.spark.jobs.usage import usage

BUCKET = "lake"
SEGMENTS = 4


@contextmanager
def token_endpoint(public_key):
    """Serve Google's tokens from a thread: a test that waits for Spark serves nothing."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def run(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    served = serving(GcsTokenEndpoint(public_key))
    try:
        url = run(served.__aenter__())
        yield f"{url}/token"
        run(served.__aexit__(None, None, None))
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@contextmanager
def google(directory):
    """Run a store that is reached with the file of a service account."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = directory / "account.json"
    with token_endpoint(key.public_key()) as token_uri, running_fake_gcs(directory) as store:
        document = {"type": "service_account", "client_email": ACCOUNT, "private_key": pem.decode()}
        account.write_text(json.dumps(document | {"token_uri": token_uri}))
        store.create_bucket(BUCKET)
        yield (
            store.endpoint,
            {
                "cloud_storage_backend": "google",
                "cloud_storage_bucket": BUCKET,
                "cloud_storage_gcs_credentials_file": str(account),
            },
            f"gs://{BUCKET}/tables",
        )


@contextmanager
def azure(directory):
    """Run a store that is reached with the key of an account."""
    with running_azurite(directory) as store:
        store.create_container(BUCKET)
        yield (
            store.endpoint.removesuffix(f"/{store.account}"),
            azure_properties(store, container=BUCKET),
            f"azure://{BUCKET}/tables",
        )


@pytest.fixture(params=[google, azure], ids=["google", "azure"])
def archive(request, tmp_path):
    """Give the configuration of an archive of two partitions, and a URL of the same store."""
    for number in range(2):
        write_partition(tmp_path / "logs", f"orders-{number}", segments=SEGMENTS)
    directory = tmp_path / "store"
    directory.mkdir()
    with ExitStack() as stack:
        url, properties, target = stack.enter_context(request.param(directory))
        properties |= endpoint_properties(url) | {
            "cloud_storage_segment_size_target": "1MiB",
            "cloud_storage_segment_size_min": "4KiB",
        }
        config = directory_config([tmp_path / "logs"], tmp_path / "unused", tmp_path / "state", **properties)
        del config["cloud_storage_file_root"]
        path = write_config(tmp_path / "tieringd.yaml", config)
        archive_once(path)
        yield path, target


# Long: every job runs on Spark, one after the other.
@pytest.mark.timeout(900)
def test_archive_is_read_and_rewritten(spark, archive):
    """Every job, one after the other; after each of them the records are what they should be."""
    path, target = archive
    config = load_config(path, environ={}, needs_broker=False)

    def archived():
        return [read_records(path, "orders", number=number) for number in range(2)]

    def seen_by_spark():
        table = frame(spark, {"config": str(path), "subscribe": "orders"})
        return [seen_in(table.where(f"partition = {number}")) for number in range(2)]

    records = archived()
    assert [len(some) for some in records] == [SEGMENTS * RECORDS] * 2
    assert seen_by_spark() == records
    assert scrub(spark, config).faults == ()
    assert usage(spark, config).figures["segments"] == 2 * SEGMENTS

    exported = export(spark, config, topics=["orders"], target=ParquetTarget(target))
    assert (exported.faults, exported.figures["records"]) == ((), 2 * SEGMENTS * RECORDS)
    assert export(spark, config, topics=["orders"], target=ParquetTarget(target)).figures["records"] == 0

    erased = erase(spark, config, topics=["orders"], keys=[b"k0"], requested_by="me", delete_after_ms=0)
    assert erased.faults == ()
    records = [[one for one in some if one.key != b"k0"] for some in records]
    assert seen_by_spark() == archived() == records

    merged = merge(spark, config, topics=["orders"], has_broker=False, delete_after_ms=0)
    assert (merged.faults, merged.figures["segments_after"]) == ((), 2)
    assert seen_by_spark() == archived() == records

    compacted = compact(spark, config, topics=["orders"], has_broker=False, delete_after_ms=0)
    assert compacted.faults == ()
    records = [list({one.key: one for one in some}.values()) for some in records]
    assert seen_by_spark() == archived() == records

    assert rebuild(spark, config, write=True, replace=True).faults == ()
    assert seen_by_spark() == archived() == records
    assert scrub(spark, config).faults == ()
    assert_sound(path)
