"""The location of a bucket or container and how to reach it, for each cloud: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    # An ordinary import would load aiobotocore into processes that do not need it.
    from tieringd.storage.s3.credentials import CredentialsSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings:
    """How to reach a bucket or container, and where the archive is in it; the same for each cloud."""

    prefix: str = ""
    """Put before every key, with a slash between."""
    trust_file: str | None = None
    """
    A PEM file with the authorities to trust instead of the system's.

    For the servers of Google's tokens they are trusted in addition to the system's.
    """
    disable_tls: bool = False
    """Use http where the endpoint has no scheme."""
    max_connections: int = 20
    """The limit for this store over all CPUs. It also limits the threads that the store uses."""
    max_idle_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    """The longest silence of a server that owes a response, or that takes no byte of a body."""


@dataclass(frozen=True, slots=True)
class GcsSettings(ConnectionSettings):
    """The bucket's location and how to reach it. Secrets are not here: they are in files and on servers."""

    bucket: str
    endpoint: str = "https://storage.googleapis.com"
    """The root URL of the API; a host without a scheme is allowed."""
    credentials_source: Literal["config_file", "gcp_instance_metadata", "anonymous"] = "config_file"
    """`anonymous` is for emulators: no token is requested or sent."""
    service_account_file: str | None = None
    """The JSON key file of a service account; needed with `config_file`."""
    metadata_host: str | None = None
    """`host[:port]` of the metadata server; None means GCE_METADATA_HOST, or Google's name."""
    storage_class: str | None = None
    """None for the bucket's default."""
    kms_key_name: str | None = None
    """`projects/P/locations/L/keyRings/R/cryptoKeys/K`; None for the bucket's default."""

    @property
    def api_root(self) -> str:
        """Return the endpoint with a scheme and without a slash at its end."""
        scheme = "http" if self.disable_tls else "https"
        return (self.endpoint if "://" in self.endpoint else f"{scheme}://{self.endpoint}").rstrip("/")

    @property
    def is_anonymous(self) -> bool:
        """Return whether requests carry no token."""
        return self.credentials_source == "anonymous"


@dataclass(frozen=True, slots=True)
class AzureSettings(ConnectionSettings):
    """The container's location and how to reach it."""

    storage_account: str
    container: str
    endpoint: str | None = None
    """A URL, or a host with a port; a `dfs` host means its `blob` one. None for Azure's own."""
    credentials: Literal["shared_key", "azure_vm_instance_metadata", "azure_aks_oidc_federation"] = (
        "shared_key"
    )
    shared_key: str | None = field(default=None, repr=False)
    managed_identity_id: str | None = None
    """The client id of a user-assigned identity; None for the machine's own."""
    access_tier: Literal["Hot", "Cool", "Cold"] | None = None
    """None for the account's default."""
    single_put_bytes: int = 64 << 20
    """Larger files are sent in blocks. The service takes up to 5000 MiB in one request."""
    block_bytes: int = 32 << 20


@dataclass(frozen=True, slots=True)
class S3Settings(ConnectionSettings):
    """The bucket's location and how to reach it."""

    bucket: str
    region: str = "us-east-1"
    endpoint_url: str | None = None
    """None for AWS itself."""
    credentials_source: CredentialsSource = "config_file"
    """The two keys below, or the role that the instance's metadata or STS provides."""
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    url_style: Literal["path", "virtual_host"] = "virtual_host"
    encryption: Literal["AES256", "aws:kms"] | None = None
    """Encryption at rest to request; None leaves it to the bucket's default."""
    kms_key_id: str | None = None
    """The key for `aws:kms`; None is the account's own."""
    storage_class: str | None = None
    """
    The class of bodies from files, which are the segments.

    Manifests do not get it. They are replaced often, and classes for cold data charge each of their
    versions for a month.
    """
    multipart_threshold_bytes: int = (5 << 30) - (64 << 20)
    """
    A file of this size or larger is sent in parts.

    One PUT is faster and checks one checksum, so the default is little less than the 5 GiB that S3 takes
    in one PUT.
    """
    multipart_part_bytes: int = 64 << 20
    """Size of a part, at least 5 MiB; larger where an object would have more than 10,000 parts."""
