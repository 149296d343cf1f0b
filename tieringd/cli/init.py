"""
`tieringd init`: a first configuration from a few answers, and the permissions that it needs.

Each answer is an option too. On a terminal the command asks for what no option gives; elsewhere a missing
answer has its default, or is an error that names the option. The configuration is checked before it is
written, so `tieringd config check` accepts it.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from tieringd.config import Config, parse_config
from tieringd.errors import ConfigError

SECRETS: Final = (
    "TIERINGD_ACCESS_KEY",
    "TIERINGD_SECRET_KEY",
    "TIERINGD_AZURE_KEY",
    "TIERINGD_SASL_PASSWORD",
)
"""The variables that a written configuration may name."""


class BrokerKind(StrEnum):
    """The broker beside the daemon."""

    KAFKA = "kafka"
    REDPANDA = "redpanda"
    NONE = "none"


class Store(StrEnum):
    """The kind of the object store."""

    AWS = "aws"
    GOOGLE = "google"
    AZURE = "azure"
    FILE = "file"


class Credentials(StrEnum):
    """How the daemon logs in to the store."""

    INSTANCE = "instance"
    KEYS = "keys"


@dataclass(frozen=True, slots=True)
class Answers:
    """What the configuration is made of."""

    broker: BrokerKind
    log_dirs: tuple[str, ...]
    bootstrap: str
    user: str
    state_directory: str
    store: Store
    bucket: str
    account: str
    region: str
    endpoint: str
    prefix: str
    credentials: Credentials
    topics: tuple[str, ...]


def init(
    file: Annotated[Path, typer.Argument(help="The file to write.")] = Path("tieringd.yaml"),
    broker: Annotated[BrokerKind | None, typer.Option(help="The broker on this host.")] = None,
    log_dir: Annotated[
        list[str] | None, typer.Option(help="A log directory of the broker; may be given several times.")
    ] = None,
    bootstrap: Annotated[str | None, typer.Option(help="The broker's address, host:port.")] = None,
    user: Annotated[
        str | None, typer.Option(help="The SASL user (SCRAM-SHA-512 over TLS); empty: without a login.")
    ] = None,
    state_directory: Annotated[str | None, typer.Option(help="The daemon's own directory.")] = None,
    store: Annotated[Store | None, typer.Option(help="The kind of object store.")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="The bucket or container; with --store file, a directory.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Azure's storage account.")] = None,
    region: Annotated[str | None, typer.Option(help="The bucket's region.")] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="host:port of a store with S3's protocol that is not AWS.")
    ] = None,
    prefix: Annotated[str, typer.Option(help="A prefix of all keys, for a bucket with other data.")] = "",
    credentials: Annotated[
        Credentials | None,
        typer.Option(help="instance: the machine's own identity; keys: from the environment."),
    ] = None,
    topic: Annotated[
        list[str] | None,
        typer.Option(help="A topic to archive, or a pattern such as 'pay-*'; may be given several times."),
    ] = None,
    ask: Annotated[
        bool | None, typer.Option(help="Ask for what no option gives; the default on a terminal.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configuration, and write nothing.")
    ] = False,
) -> None:
    """
    Write a first configuration, and print the permissions that it needs; asks what no option gives.

    Nothing but the file, and a directory for it, is made.
    """
    if file.exists() and not (force or dry_run):
        raise _existing(file)
    asks = sys.stdin.isatty() if ask is None else ask
    ask_for = _Questions(asks=asks)
    kind = BrokerKind(ask_for("broker", broker, "Which broker is on this host", "kafka", _names(BrokerKind)))
    has_broker = kind is not BrokerKind.NONE
    default_dir = "/var/lib/redpanda/data" if kind is BrokerKind.REDPANDA else "/var/lib/kafka/data"
    dirs = tuple(log_dir or [ask_for("log-dir", None, "Its log directory", default_dir)])
    address = ask_for("bootstrap", bootstrap, "Its address", "localhost:9092") if has_broker else ""
    login = ask_for("user", user, "SASL user (empty: no login)", "") if has_broker else ""
    where = Store(ask_for("store", store, "Kind of object store", "aws", _names(Store)))
    names = {Store.FILE: "Directory of the archive", Store.AZURE: "Container"}
    holder = ask_for("bucket", bucket, names.get(where, "Bucket"), None)
    azure = ask_for("account", account, "Storage account", None) if where is Store.AZURE else ""
    other = (
        ask_for("endpoint", endpoint, "host:port if not AWS (empty: AWS)", "") if where is Store.AWS else ""
    )
    has_region = where in {Store.AWS, Store.GOOGLE} and not other
    answers = Answers(
        broker=kind,
        log_dirs=dirs,
        bootstrap=address,
        user=login,
        state_directory=ask_for("state-directory", state_directory, "Own directory", "/var/lib/tieringd"),
        store=where,
        bucket=holder,
        account=azure,
        region=ask_for("region", region, "Region", "us-east-1") if has_region else "",
        endpoint=other,
        prefix=prefix,
        credentials=Credentials(
            ask_for("credentials", credentials, "Log in to the store by", _usual(other), _names(Credentials))
            if where is not Store.FILE
            else Credentials.INSTANCE
        ),
        topics=tuple(topic or ask_for("topic", None, "Topics to archive, or patterns", "*").split()),
    )
    text = "".join(f"{line}\n" for line in _configuration(answers))
    try:
        config = parse_config(text, source=str(file), environ=dict.fromkeys(SECRETS, "x"))
    except ConfigError as error:
        # Its lines are those of a file that there is not.
        problems = tuple(re.sub(rf"^{re.escape(str(file))}:\d+: ", "", one) for one in error.problems)
        raise ConfigError("no file was written: an answer is wrong", problems=problems) from error
    if dry_run:
        typer.echo(text, nl=False)
    else:
        _write(file, text, replaces=force)
        typer.echo(f"{file} is written. What it needs:")
    for line in _needs(answers, config, file):
        typer.echo(line, err=dry_run)


class _Questions:
    """Asks for an answer, if no option gives it."""

    def __init__(self, *, asks: bool) -> None:
        self._asks = asks

    def __call__(
        self, option: str, given: str | None, question: str, default: str | None, choices: str = ""
    ) -> str:
        """Return *given*, the answer to *question*, or *default*; an error names the missing *option*."""
        if given is not None:
            return given
        if self._asks:
            text = f"{question} ({choices})" if choices else question
            while True:
                answer: str = typer.prompt(text, default=default, err=True)
                if not choices or answer in choices.split(", "):
                    return answer
                typer.echo(f"{answer} is none of {choices}", err=True)
        if default is None:
            raise typer.BadParameter(f"--{option} is missing, and there is no terminal to ask on")
        return default


def _names(kind: type[StrEnum]) -> str:
    return ", ".join(one.value for one in kind)


def _usual(endpoint: str) -> str:
    return Credentials.KEYS.value if endpoint else Credentials.INSTANCE.value


def _quoted(text: str) -> str:
    """Return *text* as YAML: JSON's strings are YAML's too."""
    return json.dumps(text, ensure_ascii=False)


def _configuration(answers: Answers) -> Iterator[str]:
    yield "# Written by `tieringd init`. docs/configuration.md explains every property."
    yield "# Check it after each change: tieringd config check FILE"
    yield ""
    yield "broker:"
    yield f"  kind: {answers.broker.value}"
    yield "  # All log directories of the broker, as in its own configuration (Kafka's log.dirs)."
    yield "  log_dirs:"
    yield from (f"    - {_quoted(one)}" for one in answers.log_dirs)
    if answers.bootstrap:
        yield "  # The broker on this host."
        yield "  bootstrap:"
        yield f"    - {_quoted(answers.bootstrap)}"
    if answers.user:
        yield "  security:"
        yield "    protocol: SASL_SSL"
        yield "    sasl_mechanism: SCRAM-SHA-512"
        yield f"    sasl_username: {_quoted(answers.user)}"
        yield "    sasl_password: ${TIERINGD_SASL_PASSWORD}"
        yield "    # With an authority of your own:"
        yield "    # ssl_ca_file: /etc/tieringd/broker-ca.pem"
    yield ""
    yield "# The daemon's own directory, never inside a log directory."
    yield f"state_directory: {_quoted(answers.state_directory)}"
    yield ""
    yield "cloud_storage_enabled: true"
    yield "# What a topic that is not named below gets."
    # Without a broker nothing else deletes: what is kept for ever has to be archived.
    others = "true" if answers.broker is BrokerKind.NONE else "false"
    yield f"cloud_storage_enable_remote_write: {others}"
    yield f"cloud_storage_enable_remote_read: {others}"
    yield ""
    yield from _store(answers)
    yield from _topics(answers)


def _topics(answers: Answers) -> Iterator[str]:
    if answers.broker is BrokerKind.NONE:
        yield ""
        yield "# Keep everything; without this line, and without a broker, records go after seven days."
        yield "log_retention_ms: -1"
    yield ""
    yield "# How much of an archived topic stays on the broker's disk. While the first line is false, the"
    yield "# second one is advice, which is followed when the disk needs room."
    yield "retention_local_strict: false"
    yield "retention_local_target_ms_default: 1d"
    yield ""
    yield "# The topics to archive, by name or pattern. A name goes before a pattern."
    yield "topics:"
    for name in answers.topics:
        yield f"  {_quoted(name)}:"
        yield "    redpanda.remote.write: true"
        yield "    redpanda.remote.read: true"
    yield ""
    yield "# Metrics, health and status. Set host to 0.0.0.0 where Prometheus is on another host."
    yield "admin:"
    yield "  host: 127.0.0.1"
    yield "  port: 9640"


def _store(answers: Answers) -> Iterator[str]:
    with_keys = answers.credentials is Credentials.KEYS
    yield f"cloud_storage_backend: {answers.store.value}"
    if answers.store is Store.FILE:
        yield f"cloud_storage_file_root: {_quoted(answers.bucket)}"
        return
    if answers.store is Store.AZURE:
        yield f"cloud_storage_azure_storage_account: {_quoted(answers.account)}"
        yield f"cloud_storage_azure_container: {_quoted(answers.bucket)}"
        yield (
            "cloud_storage_azure_shared_key: ${TIERINGD_AZURE_KEY}"
            if with_keys
            else "cloud_storage_credentials_source: azure_vm_instance_metadata"
        )
    else:
        yield f"cloud_storage_bucket: {_quoted(answers.bucket)}"
        if answers.region:
            yield f"cloud_storage_region: {_quoted(answers.region)}"
    if answers.endpoint:
        host, _, port = answers.endpoint.rpartition(":")
        yield f"cloud_storage_api_endpoint: {_quoted(host or answers.endpoint)}"
        yield f"cloud_storage_api_endpoint_port: {port if host else 443}"
    if answers.prefix:
        yield f"cloud_storage_prefix: {_quoted(answers.prefix)}"
    if answers.store is Store.AWS and with_keys:
        yield "# Secrets come from the environment; the systemd unit reads /etc/tieringd/environment."
        yield "cloud_storage_access_key: ${TIERINGD_ACCESS_KEY}"
        yield "cloud_storage_secret_key: ${TIERINGD_SECRET_KEY}"
    elif answers.store is Store.AWS:
        yield "cloud_storage_credentials_source: aws_instance_metadata"
    elif answers.store is Store.GOOGLE:
        yield (
            "cloud_storage_gcs_credentials_file: /etc/tieringd/google.json"
            if with_keys
            else "cloud_storage_credentials_source: gcp_instance_metadata"
        )


def _needs(answers: Answers, config: Config, target: Path) -> Iterator[str]:
    """Yield what to do before the first start: permissions on the broker and the bucket, and a check."""
    step = 1
    if answers.broker is not BrokerKind.NONE:
        yield f"\n# {step}. Permissions on the broker:"
        yield from _acls(answers, config)
        step += 1
    yield f"\n# {step}. Permissions on the store:"
    yield from _policy(answers)
    yield f"\n# {step + 1}. Then, as the broker's user:"
    yield f"tieringd config check {target}"
    yield f"tieringd doctor --config {target}"


def _acls(answers: Answers, config: Config) -> Iterator[str]:
    # Imported here: the module imports the daemon, and questions should come at once.
    from tieringd.daemon.doctor import acl_command  # noqa: PLC0415

    user = answers.user or "ANONYMOUS"
    yield acl_command(config, user, "DESCRIBE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS")
    yield acl_command(config, user, "DESCRIBE", group="*")
    for pattern in answers.topics:
        prefix = pattern.removesuffix("*")
        command = acl_command(config, user, "DESCRIBE", "DESCRIBE_CONFIGS", "DELETE", topic=prefix or "*")
        if any(character in prefix for character in "*?["):
            yield f"# {pattern} is no prefix: grant this for each topic that it matches"
        is_prefix = prefix != pattern and prefix
        yield f"{command} --resource-pattern-type prefixed" if is_prefix else command


def _policy(answers: Answers) -> Iterator[str]:
    if answers.store is Store.FILE:
        yield f"install --directory --owner kafka --group kafka {answers.bucket}"
    elif answers.store is Store.AZURE:
        scope = f"storageAccounts/{answers.account}/blobServices/default/containers/{answers.bucket}"
        yield "az role assignment create --role 'Storage Blob Data Contributor' --assignee IDENTITY \\"
        yield f"  --scope /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Storage/{scope}"
    elif answers.store is Store.GOOGLE:
        yield f"gcloud storage buckets add-iam-policy-binding gs://{answers.bucket} \\"
        yield "  --member serviceAccount:ACCOUNT --role roles/storage.objectUser"
    else:
        below = f"{answers.prefix.strip('/')}/*" if answers.prefix.strip("/") else "*"
        bucket = f"arn:aws:s3:::{answers.bucket}"
        policy = {
            "Version": "2012-10-17",
            "Statement": [
                {
                    "Effect": "Allow",
                    "Action": ["s3:ListBucket", "s3:ListBucketMultipartUploads", "s3:GetBucketVersioning"],
                    "Resource": bucket,
                },
                {
                    "Effect": "Allow",
                    "Action": [
                        "s3:GetObject",
                        "s3:PutObject",
                        "s3:DeleteObject",
                        "s3:AbortMultipartUpload",
                        "s3:ListMultipartUploadParts",
                    ],
                    "Resource": f"{bucket}/{below}",
                },
            ],
        }
        yield json.dumps(policy, indent=2)


def _write(target: Path, text: str, *, replaces: bool) -> None:
    """
    Write the file, and make its directory.

    Every user may read it: the daemon runs as the broker's user, and secrets are only named there.

    Raises:
        ConfigError: It exists, or cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if replaces else os.O_EXCL)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{target.parent} cannot be made: {error.strerror}") from error
    try:
        with os.fdopen(os.open(target, flags, 0o644), "w", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise _existing(target) from error
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from error


def _existing(target: Path) -> ConfigError:
    return ConfigError(f"{target} exists, and is left as it is", hint="Name another file, or give --force")
