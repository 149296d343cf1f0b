"""Where an S3 bucket is and how to reach it: values, and nothing that acts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tieringd.storage.s3.credentials import CredentialsSource


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is and how to reach it."""

    bucket: str
    prefix: str = ""
    """Put before every key, with a slash between."""
    region: str = "us-east-1"
    endpoint_url: str | None = None
    """None for AWS itself."""
    credentials_source: CredentialsSource = "config_file"
    """The two keys below, or the role that the instance's metadata or STS gives."""
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    url_style: Literal["path", "virtual_host"] = "virtual_host"
    trust_file: str | None = None
    """A PEM file with the authorities to trust instead of the system's."""
    disable_tls: bool = False
    """Speak http where *endpoint_url* does not say."""
    max_connections: int = 20
    """Of this store, over all CPUs; also the most threads that it uses."""
    max_idle_seconds: float = 5.0
    connect_timeout_seconds: float = 5.0
    read_timeout_seconds: float = 30.0
    """The longest silence: of a server that owes an answer, or that takes nothing of a body."""
    encryption: Literal["AES256", "aws:kms"] | None = None
    """Encryption at rest to ask for; None leaves it to the bucket's default."""
    kms_key_id: str | None = None
    """The key for `aws:kms`; None is the account's own."""
    storage_class: str | None = None
    """
    For bodies from files, which are the segments. Manifests are replaced often, and classes for
    data that rests charge each of their versions for a month.
    """
    multipart_threshold_bytes: int = (5 << 30) - (64 << 20)
    """
    A file of this size is sent in parts. One PUT is faster and checks one checksum, so the default
    is little less than the 5 GiB which S3 takes in one.
    """
    multipart_part_bytes: int = 64 << 20
    """At least 5 MiB; larger where an object would have more than 10,000 parts."""
