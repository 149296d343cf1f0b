"""Plans, which Spark writes to its event log and its web page, have no credential in them."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

SECRET, KEY_ID = "sEcReTvAlUe123", "AKIAKEYKEYKEY123"


@pytest.mark.parametrize("kind", ["read", "readStream"])
def test_plan_has_neither_key_id_nor_secret(spark, kind):
    """The plan of a table or of a stream has neither the key id nor the secret."""
    options = {"subscribe": "orders", "accessKey": KEY_ID, "secretKey": SECRET, "region": "x"}
    table = getattr(spark, kind).format("tieringd").options(**options).load("s3://bucket/prefix")
    execution = table._jdf.queryExecution()
    plan = f"{execution.logical()}{execution.analyzed().treeString()}"
    assert "tieringd" in plan
    assert KEY_ID not in plan
    assert SECRET not in plan


@pytest.mark.parametrize("kind", ["read", "readStream"])
@pytest.mark.parametrize("name", ["cloud_storage_access_key", "cloud_storage_azure_shared_key"])
def test_credential_under_a_name_that_spark_shows_makes_no_plan(spark, kind, name):
    """A stream's plan exists before its reader, so the reader is too late to refuse."""
    options = {"subscribe": "orders", name: KEY_ID}
    with pytest.raises(PySparkException, match=f"{name}: Spark shows") as raised:
        getattr(spark, kind).format("tieringd").options(**options).load("s3://bucket/prefix")
    assert KEY_ID not in str(raised.value)
