"""Price lists, and how many requests an upload takes."""

from __future__ import annotations

import pytest

from tieringd.config import parse_config
from tieringd.errors import ConfigError
from tieringd.policies.prices import LIST_PRICES, Prices
from tieringd.spark.jobs.prices import UploadRequests, list_prices, read_prices

MIB, GIB = 1 << 20, 1 << 30
S3 = """\
state_directory: /nowhere
cloud_storage_bucket: archive
cloud_storage_region: us-east-1
cloud_storage_access_key: k
cloud_storage_secret_key: s
cloud_storage_backend: aws
"""
AZURE = """\
state_directory: /nowhere
cloud_storage_azure_storage_account: account
cloud_storage_azure_container: container
cloud_storage_azure_shared_key: c2VjcmV0
"""
FILE = "state_directory: /nowhere\ncloud_storage_backend: file\ncloud_storage_file_root: /somewhere\n"
PARTS = "cloud_storage_multipart_threshold_bytes: 100MiB\ncloud_storage_multipart_part_size_bytes: 10MiB\n"


def config(text):
    return parse_config(text, source="test", environ={}, needs_broker=False)


def test_list_prices_go_by_the_store():
    """The price of a directory cannot be known."""
    assert list_prices(config(S3)) is LIST_PRICES["aws"]
    assert list_prices(config(AZURE)) is LIST_PRICES["azure"]
    assert list_prices(config(FILE)) is None
    assert all("list price of 20" in one.label for one in LIST_PRICES.values())


def test_prices_of_a_file(tmp_path):
    """Label and currency are those of the file, or plain ones."""
    path = tmp_path / "prices.yaml"
    path.write_text("storage_gib_month: 0.01\nwrites_1000: 1\ncurrency: EUR\nlabel: our contract\n")
    assert read_prices(path) == Prices("our contract", "EUR", 0.01, 1.0)
    path.write_text("storage_gib_month: 0\nwrites_1000: 0\n")
    assert read_prices(path) == Prices("prices.yaml", "USD", 0.0, 0.0)


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("storage_gib_month: 1\n", ("writes_1000: expected",)),
        ("storage_gib_month: x\nwrites_1000: -1\n", ("storage_gib_month: expected", "writes_1000: expected")),
        (
            "storage_gib_month: .nan\nwrites_1000: .inf\n",
            ("storage_gib_month: expected", "writes_1000: expected"),
        ),
        (
            "storage_gib_month: true\nwrites_1000: 1\nreads: 1\n",
            ("reads: there is no", "storage_gib_month: exp"),
        ),
    ],
)
def test_wrong_prices_are_refused_with_their_keys(tmp_path, text, problems):
    """All faults at once."""
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_prices(path)
    assert len(refused.value.problems) == len(problems)
    assert all(
        found.startswith(wanted) for found, wanted in zip(refused.value.problems, problems, strict=True)
    )


@pytest.mark.parametrize("text", ["- 1\n", "", "a: [\n"])
def test_file_that_is_no_list_of_prices_is_refused(tmp_path, text):
    """The error says what has to be in the file, or what is wrong with it."""
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"prices\.yaml"):
        read_prices(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prices(tmp_path / "missing")


def test_costs():
    """Storage costs by GiB and month, and writes by a thousand requests."""
    prices = Prices("", "USD", 0.02, 0.005)
    assert (prices.storage_cost(50 * GIB), prices.write_cost(10_000)) == pytest.approx((1.0, 0.05))


@pytest.mark.parametrize(
    ("text", "size_bytes", "requests"),
    [
        (S3 + PARTS, 100 * MIB - 1, 1),
        (S3 + PARTS, 100 * MIB, 12),
        (S3 + PARTS, 101 * MIB, 13),
        (AZURE + PARTS, 101 * MIB, 12),
        (FILE, 100 * GIB, 1),
    ],
)
def test_requests_of_an_object(text, size_bytes, requests):
    """Parts, and what begins and completes them; a segment has an index and a commit besides."""
    found = UploadRequests.of(config(text))
    assert found.of_object(size_bytes) == requests
    assert found.of_segment(size_bytes) == requests + 2
