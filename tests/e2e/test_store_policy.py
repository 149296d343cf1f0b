"""The bucket policy that `tieringd init` prints suffices, and `doctor` tells when an action is missing."""

from __future__ import annotations

import asyncio
import json
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from tests.e2e.archives import assert_whole, read_log
from tests.e2e.conftest import BUCKET
from tests.e2e.log_files import write_partition
from tests.support.daemon import (
    directory_config,
    endpoint_properties,
    run_command,
    s3_properties,
    write_config,
)
from tests.support.fault_proxy import Answer, fault_proxy

if TYPE_CHECKING:
    from tests.support.fault_proxy import ProxiedExchange

_DENIED = Answer(
    "403 Forbidden",
    body=b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
    headers={"Content-Type": "application/xml"},
)

TRIED = {
    "s3:DeleteObject": "delete",
    "s3:GetObject": "get",
    "s3:ListBucket": "list",
    "s3:PutObject": "put",
}
"""
What an archive of small files needs, and the word of the request that `doctor` names without it.

Large files and the jobs that erase records need the other actions of the policy.
"""


def action_of(exchange: ProxiedExchange) -> tuple[str, str]:
    """Return the action that S3 asks a policy for, and the object; an empty one is the bucket."""
    url = urlsplit(exchange.path)
    _, _, key = url.path.lstrip("/").partition("/")
    asked = parse_qs(url.query, keep_blank_values=True).keys()
    if not key:
        if "uploads" in asked:
            return "s3:ListBucketMultipartUploads", ""
        if "versioning" in asked:
            return "s3:GetBucketVersioning", ""
        return ("s3:DeleteObject" if "delete" in asked else "s3:ListBucket"), ""
    if "uploadId" in asked and exchange.method in {"GET", "DELETE"}:
        return ("s3:ListMultipartUploadParts" if exchange.method == "GET" else "s3:AbortMultipartUpload"), key
    of_objects = {"GET": "s3:GetObject", "HEAD": "s3:GetObject", "DELETE": "s3:DeleteObject"}
    return of_objects.get(exchange.method, "s3:PutObject"), key


class Policy:
    """What a user may do: other requests are refused, as the store itself would."""

    def __init__(self, prefix: str, actions: set[str]) -> None:
        self.prefix, self.actions = prefix, actions
        self.refused: set[str] = set()
        self.used: set[str] = set()

    def weather(self, exchange: ProxiedExchange) -> Answer | None:
        """Refuse what is not allowed."""
        action, key = action_of(exchange)
        self.used.add(action)
        if action in self.actions and (not key or key.startswith(f"{self.prefix}/")):
            return None
        self.refused.add(f"{action} {key}")
        return _DENIED


def printed_policy(prefix: str, directory) -> set[str]:
    """Return the actions of the policy that `tieringd init` prints."""
    done = run_command(
        *("init", str(directory / "init.yaml"), "--broker", "none", "--log-dir", str(directory / "logs")),
        *("--store", "aws", "--bucket", BUCKET, "--prefix", prefix, "--region", "eu-central-1"),
    )
    assert done.returncode == 0, done.stderr
    policy = json.loads(re.search(r"^\{.*^\}", done.stdout.decode(), re.DOTALL | re.MULTILINE)[0])
    assert {one["Resource"] for one in policy["Statement"]} == {
        f"arn:aws:s3:::{BUCKET}",
        f"arn:aws:s3:::{BUCKET}/{prefix}/*",
    }
    return {action for one in policy["Statement"] for action in one["Action"]}


# Long: eight commands, each a process of its own, on a real store.
async def test_printed_policy_suffices_and_one_action_less_is_told(seaweedfs, prefix, tmp_path):
    """A daemon archives, and all is read and verified; `doctor` finds a fault without any of the actions."""
    write_partition(tmp_path / "logs", "orders-0", segments=3)
    actions = await asyncio.to_thread(printed_policy, prefix, tmp_path)
    async with fault_proxy(seaweedfs.endpoint_url) as proxy:
        config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state")
        del config["cloud_storage_file_root"]
        config |= s3_properties(seaweedfs, bucket=BUCKET, prefix=prefix) | endpoint_properties(proxy.url)
        path = write_config(tmp_path / "tieringd.yaml", config)

        async def doctor():
            done = await asyncio.to_thread(run_command, "doctor", "--config", str(path), "--format", "json")
            stores = [one for one in json.loads(done.stdout) if one["check"].startswith("store")]
            return [one for one in stores if one["outcome"] in {"fault", "warning"}]

        policy = Policy(prefix, actions)
        proxy.weather = policy.weather
        before = await doctor()
        done = await asyncio.to_thread(run_command, "run", "--once", "--config", str(path))
        assert done.returncode == 0, done.stderr
        assert await asyncio.to_thread(read_log, path, "orders")
        await asyncio.to_thread(assert_whole, path)
        assert policy.refused == set()

        assert policy.used == TRIED.keys()
        for action, verb in TRIED.items():
            less = Policy(prefix, actions - {action})
            proxy.weather = less.weather
            found = [one for one in await doctor() if one not in before]
            assert less.refused, action
            assert any(one["message"].startswith(f"{verb} ") for one in found), (action, found)
        proxy.weather = lambda _: None
