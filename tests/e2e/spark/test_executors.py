"""Executors in processes of their own, with credentials that are not the driver's."""

# Long: a standalone cluster of Spark starts.

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.archives import archived_manifest
from tests.e2e.conftest import BUCKET
from tests.e2e.sample_topics import codec_topic
from tests.e2e.spark.rows import s3_options

_ROOT = Path(__file__).parents[3]
_TIMEOUT_SECONDS = 600
_TOPIC = codec_topic("lz4")


@pytest.fixture
def read_on_cluster(tmp_path):
    """Give a function that reads in another process, whose executor is a third one."""

    def read(readings, *, driver, executors):
        wanted = json.dumps({"executor_environment": executors, "readings": readings})
        # Spark's worker would keep its files where Spark is installed.
        places = {"PYTHONPATH": str(_ROOT), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_WORKER_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.spark_cluster_reading", str(tmp_path), wanted],
            check=False,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            cwd=tmp_path,
            env=os.environ | places | driver,
        )
        assert done.returncode == 0, done.stderr.decode()
        return json.loads(done.stdout.splitlines()[-1])

    return read


# Long: a standalone cluster of Spark starts.
@pytest.mark.timeout(1800)  # The first test of Spark waits for all that it needs.
def test_executor_uses_its_own_credentials(read_on_cluster, seaweedfs, samples, sample_objects):
    """The driver's environment stays with the driver. No registration and no copy of it is needed."""
    options = s3_options(seaweedfs, bucket=BUCKET, prefix=samples.prefix) | {"subscribe": _TOPIC}
    secret = {"FIRST_SECRET": seaweedfs.secret_key, "SECOND_SECRET": seaweedfs.secret_key}
    first, second = (options | {"secretKey": f"${{{name}}}"} for name in secret)

    found = read_on_cluster(
        [first, second], driver=secret, executors=secret | {"SECOND_SECRET": "not the driver's"}
    )

    assert found[0] == {"records": archived_manifest(sample_objects, _TOPIC).next_offset}
    assert "task_reader.py" in found[1]["error"]
    assert "StorageDenied" in found[1]["error"]
