"""Where a Cloud Storage bucket is and how to reach it: values, and nothing that acts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class GcsSettings:
    """Where the bucket is and how to reach it. It holds no secret: those are in files and with servers."""

    bucket: str
    prefix: str = ""
    """Put before every key, with a slash between."""
    endpoint: str = "https://storage.googleapis.com"
    """The root of the API; a host without a scheme will do."""
    credentials_source: Literal["config_file", "gcp_instance_metadata", "anonymous"] = "config_file"
    """`anonymous` is for emulators: no token is asked for or sent."""
    service_account_file: str | None = None
    """The JSON key file of a service account; needed with `config_file`."""
    metadata_host: str | None = None
    """`host[:port]` of the metadata server; None means GCE_METADATA_HOST, or Google's name."""
    trust_file: str | None = None
    """A PEM file with the authorities to trust instead of the system's (for tokens: besides them)."""
    disable_tls: bool = False
    """Speak http where *endpoint* does not say."""
    storage_class: str | None = None
    """None for the bucket's own."""
    kms_key_name: str | None = None
    """`projects/P/locations/L/keyRings/R/cryptoKeys/K`; None for the bucket's own."""
    max_connections: int = 20
    max_idle_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    """The longest silence: of a server that owes an answer, or that takes nothing of a body."""

    @property
    def api_root(self) -> str:
        """Return the endpoint with a scheme and without a slash at its end."""
        scheme = "http" if self.disable_tls else "https"
        return (self.endpoint if "://" in self.endpoint else f"{scheme}://{self.endpoint}").rstrip("/")

    @property
    def is_anonymous(self) -> bool:
        """Say whether requests carry no token."""
        return self.credentials_source == "anonymous"
