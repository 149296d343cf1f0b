"""Plans, which Spark writes to its event log and its web page, have no credential in them."""

from __future__ import annotations

import pytest

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
