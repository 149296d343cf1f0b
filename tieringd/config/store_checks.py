"""
The rules between the properties of the object store: what each kind of access needs and cannot use.

They are tables by backend and by source of credentials. A property of another backend has no effect,
which is probably a mistake. A credentials source of another cloud is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from tieringd.config.access import GCS_ENDPOINT, HTTPS_PORT, Backend, CredentialsSource
from tieringd.config.model import Config
from tieringd.config.rule_violation import RuleViolation
from tieringd.config.yaml_source import Place

_AZURE = "cloud_storage_azure_"
_PLUGIN = "cloud_storage_plugin"
_BACKEND: Place = ("cloud_storage_backend",)
_SOURCE: Place = ("cloud_storage_credentials_source",)
_ENDPOINT: Place = ("cloud_storage_api_endpoint",)
_ON: Place = ("cloud_storage_enabled",)
_INFERRED_FROM: tuple[Place, ...] = (
    ("cloud_storage_bucket",),
    ("cloud_storage_region",),
    ("cloud_storage_gcs_credentials_file",),
    (f"{_AZURE}storage_account",),
    (f"{_AZURE}container",),
    _SOURCE,
    _ENDPOINT,
)

_SOURCES: dict[Backend, tuple[str, ...]] = {
    "aws": ("config_file", "aws_instance_metadata", "sts"),
    "google": ("config_file", "gcp_instance_metadata"),
    "azure": ("config_file", "azure_vm_instance_metadata", "azure_aks_oidc_federation"),
    "file": ("config_file",),
    "plugin": get_args(CredentialsSource),
}
_BUCKET_NAMES = ("cloud_storage_bucket", "cloud_storage_region")
_KEYS = ("cloud_storage_access_key", "cloud_storage_secret_key")
_GOOGLE_FILE = "cloud_storage_gcs_credentials_file"
_AZURE_NAMES = (f"{_AZURE}storage_account", f"{_AZURE}container")
_AZURE_KEY = f"{_AZURE}shared_key"
_AZURE_IDENTITY = f"{_AZURE}managed_identity_id"
_AZURE_ADLS = (f"{_AZURE}adls_endpoint", f"{_AZURE}adls_port")
_ALL_AZURE = (*_AZURE_NAMES, _AZURE_KEY, _AZURE_IDENTITY, *_AZURE_ADLS)
_MULTIPART = ("cloud_storage_multipart_threshold_bytes", "cloud_storage_multipart_part_size_bytes")
_NETWORK = (
    "cloud_storage_credentials_source",
    "cloud_storage_api_endpoint",
    "cloud_storage_api_endpoint_port",
    "cloud_storage_disable_tls",
    "cloud_storage_trust_file",
    "cloud_storage_url_style",
    "cloud_storage_sse",
    "cloud_storage_sse_kms_key_id",
    "cloud_storage_storage_class",
    *_MULTIPART,
)
_WITHOUT_EFFECT: dict[Backend, tuple[str, ...]] = {
    "aws": (_PLUGIN, "cloud_storage_file_root", _GOOGLE_FILE, *_ALL_AZURE),
    "google": (_PLUGIN, "cloud_storage_file_root", *_ALL_AZURE),
    "azure": (_PLUGIN, "cloud_storage_file_root", *_BUCKET_NAMES, *_KEYS, _GOOGLE_FILE),
    # Only the plug-in knows which properties it reads.
    "plugin": (),
    "file": (_PLUGIN, *_BUCKET_NAMES, *_KEYS, _GOOGLE_FILE, *_ALL_AZURE, *_NETWORK),
}
_CREDENTIALS: dict[str, tuple[str, ...]] = {
    "config_file": (*_KEYS, _GOOGLE_FILE, _AZURE_KEY),
    "azure_vm_instance_metadata": (_AZURE_IDENTITY,),
}
"""The properties that a source of credentials reads. With another source they have no effect."""
_AZURE_PUT_MIB, _AZURE_BLOCK_MIB = 5000, 4000
_UNREADABLE_CLASSES = frozenset(["GLACIER", "DEEP_ARCHIVE", "ARCHIVE"])
_CLASSES: dict[Backend, tuple[str, ...]] = {
    "google": ("STANDARD", "NEARLINE", "COLDLINE", "ARCHIVE"),
    "azure": ("Hot", "Cool", "Cold"),
}
"""S3 has no such list: a compatible server names its classes freely."""


def find_store_contradictions(config: Config) -> Iterator[RuleViolation]:
    """Yield the faults that keep the object store from being opened."""
    backend = config.backend
    if backend is None:
        yield RuleViolation(
            (_BACKEND, _ON, *_INFERRED_FROM),
            "is required: set file, aws, google, azure or plugin, or let it be inferred from a bucket with "
            "its region, an endpoint, or a storage account",
        )
        return
    # A source of another cloud is reported alone: it explains more than the properties that are missing.
    if config.cloud_storage_credentials_source not in _SOURCES[backend] and backend != "file":
        yield RuleViolation(
            (_SOURCE, _BACKEND, *_INFERRED_FROM),
            f"must be one of {', '.join(_SOURCES[backend])} with the {backend} backend, "
            f"not {config.cloud_storage_credentials_source}",
        )
        return
    for name, reason in _required(config, backend):
        if getattr(config, name) is None:
            yield RuleViolation(((name,), _BACKEND, _ON, *_INFERRED_FROM), f"is required for {reason}")
    yield from _google_credentials(config)
    yield from _encryption(config)
    yield from _storage_class(config, backend)
    yield from _parts(config)


def find_store_doubts(config: Config) -> Iterator[RuleViolation]:
    """Yield settings of the object store that have no effect, or probably an unintended one."""
    backend = config.backend
    if backend is None:
        return
    for name in _WITHOUT_EFFECT[backend]:
        if name in config.model_fields_set:
            yield RuleViolation(((name,), _BACKEND), f"has no effect with the {backend} backend")
    source = config.cloud_storage_credentials_source
    read = _CREDENTIALS.get(source, ())
    for name in dict.fromkeys(name for names in _CREDENTIALS.values() for name in names):
        if name in config.model_fields_set and name not in (*read, *_WITHOUT_EFFECT[backend]):
            yield RuleViolation(
                ((name,), _SOURCE), f"has no effect while cloud_storage_credentials_source is {source}"
            )
    yield from _idle_transfer_settings(config, backend)
    if backend == "azure":
        yield from _idle_adls_settings(config)
    if (
        backend != "file"
        and config.cloud_storage_api_endpoint is not None
        and config.cloud_storage_disable_tls
        and config.cloud_storage_api_endpoint_port == HTTPS_PORT
    ):
        yield RuleViolation(
            (("cloud_storage_disable_tls",), ("cloud_storage_api_endpoint_port",)),
            "plain HTTP uses port 443 here; if that is not intended, set cloud_storage_api_endpoint_port",
        )
    if config.cloud_storage_single_writer:
        yield RuleViolation(
            (("cloud_storage_single_writer",),),
            "a store that ignores conditional writes is accepted; make sure yourself that no second daemon "
            "writes to it",
        )


def _idle_transfer_settings(config: Config, backend: Backend) -> Iterator[RuleViolation]:
    if config.cloud_storage_sse == "managed" and backend in {"google", "azure"}:
        yield RuleViolation(
            (("cloud_storage_sse",), _BACKEND),
            f"has no effect with the {backend} backend, which always encrypts with keys of its own",
        )
    if config.store_kind == "gcs":
        for name in _MULTIPART:
            if name in config.model_fields_set:
                yield RuleViolation(
                    ((name,), _BACKEND), "has no effect: GCS's own API takes every object in one piece"
                )


def _idle_adls_settings(config: Config) -> Iterator[RuleViolation]:
    host, port = _AZURE_ADLS
    if config.cloud_storage_azure_adls_endpoint is None and config.cloud_storage_azure_adls_port is not None:
        yield RuleViolation(((port,), (host,)), f"has no effect without {host}")
    if config.cloud_storage_azure_adls_endpoint is not None and config.cloud_storage_api_endpoint is not None:
        yield RuleViolation(
            ((host,), _ENDPOINT), "has no effect, because cloud_storage_api_endpoint takes precedence"
        )


def _required(config: Config, backend: Backend) -> Iterator[tuple[str, str]]:
    """Yield each property that must be set, with the reason."""
    what = f"the {backend} backend"
    from_file = config.cloud_storage_credentials_source == "config_file"
    match backend:
        case "file":
            yield "cloud_storage_file_root", what
        case "plugin":
            yield _PLUGIN, what
        case "azure":
            yield from ((name, what) for name in _AZURE_NAMES)
            if from_file:
                yield _AZURE_KEY, f"{what}, unless cloud_storage_credentials_source names an identity"
        case "aws" | "google":
            yield "cloud_storage_bucket", what
            if config.uses_hmac_keys or (backend == "aws" and from_file):
                yield from ((name, _reason_for_keys(backend)) for name in _KEYS)
            if config.cloud_storage_api_endpoint in (None, GCS_ENDPOINT):
                yield "cloud_storage_region", what


def _reason_for_keys(backend: Backend) -> str:
    if backend == "aws":
        return "the aws backend, unless cloud_storage_credentials_source names a role"
    return (
        "the google backend, unless there is cloud_storage_gcs_credentials_file "
        "or cloud_storage_credentials_source names an identity"
    )


def _google_credentials(config: Config) -> Iterator[RuleViolation]:
    if config.backend != "google" or config.cloud_storage_gcs_credentials_file is None:
        return
    if config.cloud_storage_credentials_source != "config_file":
        return
    for name in _KEYS:
        if getattr(config, name) is not None:
            yield RuleViolation(
                ((name,), (_GOOGLE_FILE,), _SOURCE),
                f"contradicts {_GOOGLE_FILE}, which also gives credentials; remove one of them",
            )


def _encryption(config: Config) -> Iterator[RuleViolation]:
    how: Place = ("cloud_storage_sse",)
    key: Place = ("cloud_storage_sse_kms_key_id",)
    if config.cloud_storage_sse_kms_key_id is not None and config.cloud_storage_sse != "kms":
        yield RuleViolation((key, how), "needs cloud_storage_sse: kms as well")
    if config.cloud_storage_sse != "kms":
        return
    if config.backend == "azure":
        yield RuleViolation(
            (how, _BACKEND, *_INFERRED_FROM),
            "Azure takes no key with a request; make an encryption scope the default of the container",
        )
    if config.backend == "google" and config.cloud_storage_sse_kms_key_id is None:
        yield RuleViolation(
            (key, how, _BACKEND, *_INFERRED_FROM),
            f"is required for the {config.backend} backend with cloud_storage_sse: kms",
        )
    if config.backend == "google" and config.store_kind == "s3":
        yield RuleViolation(
            (how, *_INFERRED_FROM),
            "GCS takes no KMS key with HMAC keys; use a service account or an identity",
        )


def _storage_class(config: Config, backend: Backend) -> Iterator[RuleViolation]:
    place: Place = ("cloud_storage_storage_class",)
    found = config.cloud_storage_storage_class
    if found is None or backend == "file":
        return
    known = _CLASSES.get(backend)
    if known is not None and found not in known:
        yield RuleViolation(
            (place, _BACKEND, *_INFERRED_FROM),
            f"must be one of {', '.join(known)} with the {backend} backend, not {found!r}",
        )
    elif backend == "aws" and found in _UNREADABLE_CLASSES:
        yield RuleViolation(
            (place, _BACKEND, *_INFERRED_FROM),
            f"objects of class {found} cannot be read until they are restored, which takes hours; use "
            "GLACIER_IR or STANDARD_IA",
        )


def _parts(config: Config) -> Iterator[RuleViolation]:
    threshold, part = _MULTIPART
    if config.backend == "azure":
        for name, most in ((threshold, _AZURE_PUT_MIB), (part, _AZURE_BLOCK_MIB)):
            if getattr(config, name) > most * 2**20:
                yield RuleViolation(
                    ((name,), _BACKEND, *_INFERRED_FROM), f"Azure takes at most {most}MiB at once"
                )
    if config.cloud_storage_multipart_part_size_bytes > config.cloud_storage_multipart_threshold_bytes:
        yield RuleViolation(((part,), (threshold,)), f"must not be more than {threshold}")
