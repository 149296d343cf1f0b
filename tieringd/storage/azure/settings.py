"""Where an Azure container is and how to reach it: values, and nothing that acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class AzureSettings:
    """Where the container is and how to reach it."""

    storage_account: str
    container: str
    prefix: str = ""
    """Put before every key, with a slash between."""
    endpoint: str | None = None
    """A URL, or a host with a port; a `dfs` host means its `blob` one. None for Azure's own."""
    credentials: Literal["shared_key", "azure_vm_instance_metadata", "azure_aks_oidc_federation"] = (
        "shared_key"
    )
    shared_key: str | None = field(default=None, repr=False)
    managed_identity_id: str | None = None
    """The client id of a user-assigned identity; None for the machine's own."""
    trust_file: str | None = None
    """A PEM file with the authorities to trust instead of the system's."""
    disable_tls: bool = False
    """Speak http where *endpoint* does not say."""
    max_connections: int = 20
    max_idle_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    """The longest silence: of a server that owes an answer, or that takes nothing of a body."""
    access_tier: Literal["Hot", "Cool", "Cold"] | None = None
    """None for the account's default."""
    single_put_bytes: int = 64 << 20
    """Larger files go up in blocks. The service takes up to 5000 MiB in one request."""
    block_bytes: int = 32 << 20
