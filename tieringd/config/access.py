"""
Where the archive is and how to reach it: the properties of the object store.

Properties that the file does not set are inferred here, and only here: the backend, the store client for
it, its address. `config.store_checks` has the rules between these properties.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, SecretStr

from tieringd.config.fields import (
    NEVER_CLEARED,
    AbsolutePath,
    Choice,
    Flag,
    Number,
    SecretText,
    Text,
    size,
)
from tieringd.config.properties import STRICT

Backend: TypeAlias = Literal["file", "aws", "google", "azure", "plugin"]
StoreKind: TypeAlias = Literal["file", "s3", "gcs", "azure", "plugin"]
CredentialsSource: TypeAlias = Literal[
    "config_file",
    "aws_instance_metadata",
    "sts",
    "gcp_instance_metadata",
    "azure_vm_instance_metadata",
    "azure_aks_oidc_federation",
]

GCS_ENDPOINT = "storage.googleapis.com"
HTTPS_PORT = 443
_AZURE_BLOB_DOMAIN = "blob.core.windows.net"
_MIB, _GIB = 2**20, 2**30

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|\[[0-9A-Fa-f:.]{2,45}\]|[A-Za-z0-9])"
_HOST_RULE = "must be a bare host name; the port and TLS have their own properties"
_PREFIX_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9!_.*'()=-]+"
_PREFIX = rf"(?:{_PREFIX_PART}(?:/{_PREFIX_PART})*)?"
_CONTAINER = r"\$root|[a-z0-9](?:-?[a-z0-9]){2,62}"


class StoreAccess(BaseModel):
    """The place of the archive, and the credentials to reach it."""

    model_config = STRICT

    cloud_storage_backend: Annotated[Annotated[Backend, Choice()] | None, NEVER_CLEARED] = None
    """The kind of object store. Not set: inferred from the endpoint, account or credentials source."""
    cloud_storage_plugin: Annotated[
        Annotated[str, Text("text", r"[A-Za-z0-9._-]{1,64}", "must be the name of an entry point")] | None,
        NEVER_CLEARED,
    ] = None
    """The store of an installed package, by its name in the entry point group `tieringd.object_stores`."""
    cloud_storage_file_root: Annotated[Annotated[Path, AbsolutePath()] | None, NEVER_CLEARED] = None
    """Directory that is used as the bucket; required for the file backend."""
    cloud_storage_bucket: Annotated[
        Annotated[
            str,
            Text(
                "text",
                r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]",
                "must be a bucket's bare name",
            ),
        ]
        | None,
        NEVER_CLEARED,
    ] = None
    """The bucket; required for the aws and google backends."""
    cloud_storage_region: Annotated[
        Annotated[str, Text("text", r"[A-Za-z0-9_-]+", "must be the name of a region, such as eu-central-1")]
        | None,
        NEVER_CLEARED,
    ] = None
    """The bucket's region; required for AWS and GCS themselves, optional with another endpoint."""
    cloud_storage_credentials_source: Annotated[CredentialsSource, Choice(), NEVER_CLEARED] = "config_file"
    """The source of the credentials: this file, or the cloud's identity service."""
    cloud_storage_access_key: Annotated[Annotated[str, Text()] | None, NEVER_CLEARED] = None
    """The id of the access key or of a GCS HMAC key; required for the aws backend with config_file."""
    cloud_storage_secret_key: Annotated[Annotated[SecretStr, SecretText()] | None, NEVER_CLEARED] = None
    """The access key's secret. Take it from the environment: `${NAME}`."""
    cloud_storage_gcs_credentials_file: Annotated[Annotated[Path, AbsolutePath()] | None, NEVER_CLEARED] = (
        None
    )
    """JSON file of a Google service account; GCS is then reached by its own API, not by HMAC keys."""
    cloud_storage_azure_storage_account: Annotated[
        Annotated[str, Text("text", r"[a-z0-9]{3,24}", "must be 3 to 24 lower-case letters and digits")]
        | None,
        NEVER_CLEARED,
    ] = None
    """The storage account; required for the azure backend."""
    cloud_storage_azure_container: Annotated[
        Annotated[
            str,
            Text("text", _CONTAINER, "must be 3 to 63 lower-case letters, digits and single dashes"),
        ]
        | None,
        NEVER_CLEARED,
    ] = None
    """The container; required for the azure backend."""
    cloud_storage_azure_shared_key: Annotated[Annotated[SecretStr, SecretText()] | None, NEVER_CLEARED] = None
    """The account's key; required for the azure backend with config_file. Take it from the environment."""
    cloud_storage_azure_managed_identity_id: Annotated[Annotated[str, Text()] | None, NEVER_CLEARED] = None
    """Client id of a user-assigned managed identity; not set: the machine's own identity."""
    cloud_storage_azure_adls_endpoint: Annotated[
        Annotated[str, Text("host", _HOST, _HOST_RULE)] | None, NEVER_CLEARED
    ] = None
    """Host for accounts with a hierarchical namespace (ADLS Gen2), if it is not Azure's own."""
    cloud_storage_azure_adls_port: Annotated[Annotated[int, Number(1, 65535)] | None, NEVER_CLEARED] = None
    """Port of `cloud_storage_azure_adls_endpoint`; not set: 443."""
    cloud_storage_api_endpoint: Annotated[
        Annotated[str, Text("host", _HOST, _HOST_RULE)] | None, NEVER_CLEARED
    ] = None
    """The store's host; not set: the cloud's own host for the region or account."""
    cloud_storage_api_endpoint_port: Annotated[Annotated[int, Number(1, 65535)], NEVER_CLEARED] = HTTPS_PORT
    """Port of the store's host."""
    cloud_storage_disable_tls: Annotated[Annotated[bool, Flag()], NEVER_CLEARED] = False
    """Use plain HTTP to the store, for example when a proxy terminates TLS."""
    cloud_storage_trust_file: Annotated[Annotated[Path, AbsolutePath()] | None, NEVER_CLEARED] = None
    """PEM file with the authorities to trust; not set: the system's authorities."""
    cloud_storage_url_style: Annotated[Literal["virtual_host", "path"], Choice()] | None = None
    """
    Where a request names the bucket or account; null: in the host for the clouds themselves, else in the
    path.
    """
    cloud_storage_prefix: Annotated[
        str,
        Text("text", _PREFIX, "must be letters, digits and !_.*'()=- in parts with one slash between them"),
    ] = ""
    """Prefix of every object key; a slash is put after it."""

    cloud_storage_sse: Annotated[Literal["managed", "kms"], Choice()] | None = None
    """Encryption at rest: by S3's own keys, or by a KMS key (S3, GCS); null: the bucket's default."""
    cloud_storage_sse_kms_key_id: Annotated[str, Text()] | None = None
    """The KMS key, by its full name for GCS; null, with S3 only: the account's default key."""
    cloud_storage_storage_class: (
        Annotated[str, Text("text", r"[A-Za-z0-9_]{1,64}", "must be one word")] | None
    ) = None
    """Storage class or access tier of new segments, such as STANDARD_IA or Cool; null: the bucket's."""
    cloud_storage_multipart_threshold_bytes: Annotated[int, size(5 * _MIB, 5 * _GIB)] = 4 * _GIB
    """Larger objects are uploaded in parts, except by GCS's own API."""
    cloud_storage_multipart_part_size_bytes: Annotated[int, size(5 * _MIB, 5 * _GIB)] = 64 * _MIB
    """The size of the parts of an object that is uploaded in parts."""
    cloud_storage_single_writer: Annotated[bool, Flag()] = False
    """
    Accept a store without conditional writes, or a network file system. Two writers would then lose
    data.
    """

    @property
    def backend(self) -> Backend | None:
        """Return the object store to use, inferred if it is not named; None if nothing implies one."""
        return self.cloud_storage_backend or self._inferred_backend()[0]

    @property
    def backend_inferred_from(self) -> tuple[str, ...]:
        """Return the properties that the backend is inferred from; none if it is named."""
        return () if self.cloud_storage_backend is not None else self._inferred_backend()[1]

    @property
    def store_kind(self) -> StoreKind | None:
        """Return the kind of store client for the backend. GCS with HMAC keys is accessed like S3."""
        match self.backend:
            case "aws":
                return "s3"
            case "google":
                return "s3" if self.uses_hmac_keys else "gcs"
            case backend:
                return backend

    @property
    def uses_hmac_keys(self) -> bool:
        """Say whether the keys of this file give access to the store."""
        return (
            self.cloud_storage_credentials_source == "config_file"
            and self.cloud_storage_gcs_credentials_file is None
        )

    @property
    def url_style(self) -> Literal["virtual_host", "path"]:
        """Return where requests name the bucket or the Azure account."""
        if self.cloud_storage_url_style is not None:
            return self.cloud_storage_url_style
        is_azure = self.backend == "azure"
        host = self.cloud_storage_api_endpoint or (
            self.cloud_storage_azure_adls_endpoint if is_azure else None
        )
        names_account = is_azure and f"{host}".startswith(f"{self.cloud_storage_azure_storage_account}.")
        return "virtual_host" if host is None or names_account else "path"

    @property
    def endpoint_url(self) -> str | None:
        """Return the URL of the store's host, or None if the store client knows it by itself."""
        host = self.cloud_storage_api_endpoint
        if host is None and self.backend == "google" and self.uses_hmac_keys:
            host = GCS_ENDPOINT
        return None if host is None else self._url(host, self.cloud_storage_api_endpoint_port)

    @property
    def azure_account_url(self) -> str:
        """
        Return the URL of the storage account. The container's name follows it.

        The host for hierarchical namespaces is used if no other host is set.
        """
        account = self.cloud_storage_azure_storage_account
        url, host = self.endpoint_url, self.cloud_storage_azure_adls_endpoint
        if url is None and host is not None:
            url = self._url(host, self.cloud_storage_azure_adls_port or HTTPS_PORT)
        if url is None:
            return self._url(f"{account}.{_AZURE_BLOB_DOMAIN}", self.cloud_storage_api_endpoint_port)
        return f"{url}/{account}" if self.url_style == "path" else url

    def _url(self, host: str, port: int) -> str:
        return f"{'http' if self.cloud_storage_disable_tls else 'https'}://{host}:{port}"

    def _inferred_backend(self) -> tuple[Backend | None, tuple[str, ...]]:
        source, host = self.cloud_storage_credentials_source, self.cloud_storage_api_endpoint
        azure = ("cloud_storage_azure_storage_account", "cloud_storage_azure_container")
        bucket = ("cloud_storage_bucket", "cloud_storage_region")
        key_file = "cloud_storage_gcs_credentials_file"
        rules: tuple[tuple[Backend, bool, tuple[str, ...]], ...] = (
            ("azure", bool(self._given(azure)), tuple(self._given(azure))),
            ("azure", source.startswith("azure_"), ("cloud_storage_credentials_source",)),
            ("google", host == GCS_ENDPOINT, ("cloud_storage_api_endpoint",)),
            ("google", bool(self._given([key_file])), (key_file,)),
            ("google", source == "gcp_instance_metadata", ("cloud_storage_credentials_source",)),
            ("aws", host is not None, ("cloud_storage_api_endpoint",)),
            ("aws", len(self._given(bucket)) == len(bucket), bucket),
        )
        return next(((backend, names) for backend, holds, names in rules if holds), (None, ()))

    def _given(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if getattr(self, name) is not None]
