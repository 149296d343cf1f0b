"""
The permissions that docs/operating.md names for Google Cloud Storage and Azure suffice, and none is too much.

The emulators know of no permissions. A proxy before them reads from each request what the cloud would ask
for, and refuses it in the cloud's words. What the clouds themselves check beyond that is not tested here.
"""

# Long: eight commands for each cloud, each a process of its own, on a real emulator.

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.e2e.archives import assert_whole, read_log
from tests.e2e.log_files import write_partition
from tests.support.azurite import running_azurite
from tests.support.daemon import (
    azure_properties,
    directory_config,
    endpoint_properties,
    run_command,
    write_config,
)
from tests.support.fake_gcs import running_fake_gcs
from tests.support.fault_proxy import Answer, fault_proxy
from tests.support.gcs_metadata_server import running_metadata_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from tests.support.fault_proxy import ProxiedExchange

BUCKET = "permissions"
GOOGLE = {
    "storage.objects.create": {"put"},
    "storage.objects.get": {"get"},
    "storage.objects.list": {"list"},
    "storage.objects.delete": {"delete"},
}
AZURE = {"blobs/write": {"put"}, "blobs/read": {"get", "list"}, "blobs/delete": {"delete"}}
"""What the role Storage Blob Data Contributor has of blobs, and the words of `doctor` without it."""


def google_needs(exchange: ProxiedExchange) -> set[str]:
    """Return the permissions that Cloud Storage asks for."""
    url = urlsplit(exchange.path)
    query = parse_qs(url.query)
    path = url.path.strip("/").split("/")
    if path[0] == "upload" or path[-1] == "compose":
        # What replaces an object deletes it as well. Without a condition, the names are new ones.
        replaces = query.get("ifGenerationMatch", ["0"]) != ["0"]
        return {"storage.objects.create"} | ({"storage.objects.delete"} if replaces else set())
    of_bucket = {"GET": "storage.buckets.get"} if path[-2] == "b" else {"GET": "storage.objects.list"}
    of_objects = {"GET": "storage.objects.get", "DELETE": "storage.objects.delete"}
    found = of_bucket if path[-2] == "b" or path[-1] == "o" else of_objects
    return {found.get(exchange.method, f"{exchange.method} {url.path}")}


def azure_needs(exchange: ProxiedExchange) -> set[str]:
    """Return the actions that Azure Blob asks for."""
    url = urlsplit(exchange.path)
    query = parse_qs(url.query, keep_blank_values=True)
    if query.get("restype") == ["service"]:
        return {"blobServices/read"}
    if query.get("restype") == ["container"]:
        return {"blobs/read" if query.get("comp") == ["list"] else "containers/read"}
    of_blobs = {"GET": "blobs/read", "HEAD": "blobs/read", "PUT": "blobs/write", "DELETE": "blobs/delete"}
    return {of_blobs.get(exchange.method, f"{exchange.method} {url.path}")}


@dataclass
class Cloud:
    """An emulator, and the permissions of its cloud."""

    url: str
    properties: dict[str, Any]
    needs: Callable[[ProxiedExchange], set[str]]
    permissions: dict[str, set[str]]
    denied: Answer


class Policy:
    """What a user may do: other requests are refused, as the store itself would."""

    def __init__(self, cloud: Cloud, permissions: set[str]) -> None:
        self.cloud, self.permissions = cloud, permissions
        self.refused: set[str] = set()
        self.used: set[str] = set()

    def weather(self, exchange: ProxiedExchange) -> Answer | None:
        """Refuse what is not allowed."""
        needed = self.cloud.needs(exchange)
        self.used |= needed
        self.refused |= needed - self.permissions
        return self.cloud.denied if needed - self.permissions else None


@asynccontextmanager
async def google(directory: Path, monkeypatch) -> AsyncIterator[Cloud]:
    async with running_metadata_server() as metadata:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
        with running_fake_gcs(directory) as store:
            store.create_bucket(BUCKET)
            yield Cloud(
                store.endpoint,
                {
                    "cloud_storage_backend": "google",
                    "cloud_storage_bucket": BUCKET,
                    "cloud_storage_credentials_source": "gcp_instance_metadata",
                },
                google_needs,
                GOOGLE,
                Answer(
                    "403 Forbidden",
                    body=b'{"error": {"code": 403, "message": "Permission denied on resource", '
                    b'"errors": [{"reason": "forbidden", "message": "Permission denied on resource"}]}}',
                    headers={"Content-Type": "application/json"},
                ),
            )


@asynccontextmanager
async def azure(directory: Path, monkeypatch) -> AsyncIterator[Cloud]:
    with running_azurite(directory) as store:
        store.create_container(BUCKET)
        yield Cloud(
            store.endpoint.removesuffix(f"/{store.account}"),
            azure_properties(store, container=BUCKET),
            azure_needs,
            AZURE,
            Answer(
                "403 Forbidden",
                body=b"<?xml version='1.0'?><Error><Code>AuthorizationPermissionMismatch</Code>"
                b"<Message>This request is not authorized to perform this operation using this "
                b"permission.</Message></Error>",
                headers={
                    "Content-Type": "application/xml",
                    "x-ms-error-code": "AuthorizationPermissionMismatch",
                },
            ),
        )


@pytest.mark.parametrize("cloud_of", [google, azure])
async def test_named_permissions_suffice_and_one_less_is_told(cloud_of, tmp_path, monkeypatch):
    """A daemon archives, and all is read and verified; `doctor` finds a fault without any permission."""
    write_partition(tmp_path / "logs", "orders-0", segments=3)
    async with cloud_of(tmp_path, monkeypatch) as cloud, fault_proxy(cloud.url) as proxy:
        config = directory_config([tmp_path / "logs"], tmp_path, tmp_path / "state")
        del config["cloud_storage_file_root"]
        path = write_config(
            tmp_path / "tieringd.yaml", config | cloud.properties | endpoint_properties(proxy.url)
        )

        async def doctor():
            done = await asyncio.to_thread(run_command, "doctor", "--config", str(path), "--format", "json")
            stores = [one for one in json.loads(done.stdout) if one["check"].startswith("store")]
            return [one for one in stores if one["outcome"] in {"fault", "warning"}]

        policy = Policy(cloud, set(cloud.permissions))
        proxy.weather = policy.weather
        before = await doctor()
        # What `doctor` looks at beyond that is said, and is not needed.
        policy.refused.clear()
        policy.used.clear()
        done = await asyncio.to_thread(run_command, "run", "--once", "--config", str(path))
        assert done.returncode == 0, done.stderr
        assert await asyncio.to_thread(read_log, path, "orders")
        await asyncio.to_thread(assert_whole, path)
        assert policy.refused == set()
        assert policy.used == cloud.permissions.keys()

        for permission, verbs in cloud.permissions.items():
            less = Policy(cloud, cloud.permissions.keys() - {permission})
            proxy.weather = less.weather
            found = [one for one in await doctor() if one not in before]
            assert less.refused, permission
            assert any(one["message"].split(" ")[0] in verbs for one in found), (permission, found)
        proxy.weather = lambda _: None
