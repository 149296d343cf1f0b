"""
The Iceberg table of one topic: opened or created through a catalogue, with one commit for each round.

A commit has both data files and the offsets reached. The offsets are in the properties of the snapshot, and
in those of the table for the time when snapshots have expired. The newest snapshot with offsets decides
what the table holds, so that the export continues from there after a rollback of the table. Iceberg keeps
concurrent runs apart: a commit fails if the table's snapshot is no longer the one that the commit was made
from.

`without_secrets` removes the values of a catalogue's secret properties from error texts, as catalogues put
them there.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table

from tieringd.errors import ConfigError, StorageUnavailable, TieringError
from tieringd.spark.jobs.export.iceberg_layout import (
    SCHEMA,
    IcebergPartitioning,
    partition_spec,
    schema_differences,
    spec_difference,
)
from tieringd.spark.jobs.export.state import ExportState, parse_state
from tieringd.spark.jobs.export.topic_target import ExportCheckpoint

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table.snapshots import Snapshot


_IS_SECRET: Final = re.compile(r"secret|token|passw|credential|connection|key|sas|auth|header", re.IGNORECASE)
"""Matches names of secret properties. To hide a value that is not secret does little harm."""

_PART_MIN: Final = 3
"""The least length of a part of a secret that is hidden by itself. Shorter ones are parts of many words."""

STATE_PROPERTY: Final = "tieringd.export"
"""The property of snapshots and of the table with the export's state."""
SEQUENCE_PROPERTY: Final = "tieringd.export-sequence-number"
"""
The property of the table with a snapshot's sequence number: of the snapshot that the state in the table's
property belongs to, or of an earlier one.
"""


def without_secrets(text: str, properties: Mapping[str, Any]) -> str:
    """Return *text* with asterisks in place of the secrets of *properties* and of nested properties."""
    for secret in sorted({*_secrets(properties)}, key=len, reverse=True):
        encoded = (b64encode(secret.encode()).decode(), urlsafe_b64encode(secret.encode()).decode())
        for written in (secret, repr(secret)[1:-1], quote(secret), quote(secret, safe=""), *encoded):
            text = text.replace(written, "***")
    return text


def _secrets(properties: Mapping[str, Any]) -> Iterator[str]:
    for name, value in properties.items():
        if isinstance(value, dict):
            yield from _secrets(value)
            continue
        if _IS_SECRET.search(name) and value:
            yield from _with_parts(str(value))
        try:
            url = urlsplit(str(value))
            password = url.password
        except ValueError:
            continue
        if password:
            yield password
            yield unquote(password)
        if url.scheme and url.netloc and url.query:
            yield url.query
            yield from (one for _, one in parse_qsl(url.query) if len(one) >= _PART_MIN)


def _with_parts(secret: str) -> Iterator[str]:
    """Yield a secret and its parts: the halves of `id:secret`, and a header's words but the scheme."""
    yield secret
    for part in (*secret.split(":", 1), *secret.split()[1:]):
        if len(part) >= _PART_MIN:
            yield part


class IcebergTable:
    """The table to which the exports of one topic are committed."""

    def __init__(self, catalog: Catalog, identifier: tuple[str, ...]) -> None:
        self._catalog = catalog
        self._identifier = identifier
        self.name = ".".join(identifier)

    def opened(self, partition_by: IcebergPartitioning) -> Table:
        """
        Return the current table. A missing table is created.

        Raises:
            ConfigError: Our rows do not fit into the existing table.
            StorageUnavailable: The catalogue does not answer, or reports an error.
        """
        with self._asking("load"):
            try:
                table = self._catalog.load_table(self._identifier)
            except NoSuchTableError:
                table = self._created(partition_by)
        differences = list(schema_differences(table.schema()))
        if not differences:
            differences += filter(None, [spec_difference(table.schema(), table.spec())])
        if differences:
            raise ConfigError(
                f"table {self.name} does not have the layout of an export: {'; '.join(differences)}",
                hint="Export to another table",
            )
        return table

    def checkpoint(self, table: Table) -> ExportCheckpoint:
        """
        Return the state of the export in *table*.

        Raises:
            ConfigError: The table has rows of another origin than our exports. Or it was rolled back, and the
                snapshots with the state of that time have expired.
        """
        lineage = _lineage(table)
        if not lineage:
            return ExportCheckpoint(None, version=table)
        found = next(filter(None, map(_state_in, lineage)), None)
        if found is None:
            found = table.properties.get(STATE_PROPERTY)
            self._require_not_rolled_back(table, lineage[-1])
        if found is None:
            raise ConfigError(
                f"table {self.name} has rows that no tieringd export wrote: an export might append them "
                "once more",
                hint="Export to another table",
            )
        return ExportCheckpoint(parse_state(found, source=f"table {self.name}"), version=table)

    def _require_not_rolled_back(self, table: Table, oldest: Snapshot) -> None:
        """
        Check that the snapshot of the table's state may be an ancestor of *oldest*.

        *oldest* is the oldest snapshot that has not expired.

        Raises:
            ConfigError: The snapshot was committed after *oldest*, or the property with its sequence number
                is not a number.
        """
        text = table.properties.get(SEQUENCE_PROPERTY, "0")
        try:
            exported_in = int(text)
        except ValueError as error:
            raise ConfigError(
                f"table {self.name} has {text!r} for its property {SEQUENCE_PROPERTY}, which is not a number",
                hint="If the table was not rolled back since the last export, remove the property: the next "
                "commit sets it again",
            ) from error
        if (oldest.sequence_number or 0) < exported_in:
            raise ConfigError(
                f"table {self.name} was rolled back to a snapshot before the last export, and the snapshots "
                "that recorded the progress of the export at that time have expired",
                hint="Roll it forward if possible, or export to a new table",
            )

    def commit(self, table: Table, state: ExportState, files: Sequence[DataFile]) -> bool:
        """
        Append *files* to *table* and store *state*, in one commit; return False if another run was faster.

        Raises:
            StorageUnavailable: The commit may or may not have taken effect, or others kept changing the
                table.
        """
        properties = {STATE_PROPERTY: state.as_json()}
        # A repeated commit gets a later number than this one. So the stored number is never too high, and
        # a table is never mistaken for one that was rolled back.
        sequence_number = str(table.metadata.next_sequence_number())
        try:
            with _Watched(self, table, state).transaction() as transaction:
                transaction.set_properties({**properties, SEQUENCE_PROPERTY: sequence_number})
                with transaction.update_snapshot(snapshot_properties=properties).merge_append() as append:
                    for file in files:
                        append.append_data_file(file)
        except _Overtaken:
            return False
        except TieringError:
            raise
        except CommitFailedException as error:
            raise StorageUnavailable(
                f"other writers keep changing table {self.name}; nothing was appended",
                hint="Export again later",
            ) from error
        # After any other error of a catalogue or its transport the commit may have taken effect.
        except Exception as error:
            with self._asking("load"):
                found = self._catalog.load_table(self._identifier)
            if not self.holds(found, state):
                raise StorageUnavailable(
                    f"the commit to table {self.name} failed: "
                    f"{without_secrets(repr(error), self._catalog.properties)}",
                    outcome_unknown=True,
                ) from error
        return True

    def holds(self, table: Table, state: ExportState) -> bool:
        """Return whether a commit of *state* is an ancestor of the current snapshot of *table*, or is it."""
        text = state.as_json()
        return any(_state_in(snapshot) == text for snapshot in _lineage(table))

    def _created(self, partition_by: IcebergPartitioning) -> Table:
        namespace = self._identifier[:-1]
        try:
            self._catalog.create_namespace_if_not_exists(namespace)
        except Exception:
            # Another run may have been faster. Catalogues raise different errors then.
            if not self._catalog.namespace_exists(namespace):
                raise
        try:
            return self._catalog.create_table(
                self._identifier, SCHEMA, partition_spec=partition_spec(partition_by)
            )
        except TableAlreadyExistsError:
            return self._catalog.load_table(self._identifier)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Turn errors of the catalogue into StorageUnavailable. Each kind of catalogue has its own."""
        try:
            yield
        except TieringError:
            raise
        except Exception as error:
            raise StorageUnavailable(
                f"the Iceberg catalogue {self._catalog.name} failed to {what} table {self.name}: "
                f"{without_secrets(repr(error), self._catalog.properties)}",
                hint="Check the properties of the catalogue, and whether it can be reached",
            ) from error


def _lineage(table: Table) -> list[Snapshot]:
    """Return the current snapshot and its ancestors, newest first, as far as they have not expired."""
    found = []
    snapshot = table.current_snapshot()
    while snapshot is not None:
        found.append(snapshot)
        parent = snapshot.parent_snapshot_id
        snapshot = None if parent is None else table.snapshot_by_id(parent)
    return found


def _state_in(snapshot: Snapshot) -> str | None:
    return None if snapshot.summary is None else snapshot.summary.additional_properties.get(STATE_PROPERTY)


class _Overtaken(Exception):
    """Another run has committed an export meanwhile."""


class _Watched(Table):
    """
    A table on which a commit of *state* is not repeated after another run's commit.

    If a commit fails because the table has changed, pyiceberg reads the table again and appends the same
    files. That is right after a compaction, and wrong after another export of the same records.
    """

    def __init__(self, target: IcebergTable, table: Table, state: ExportState) -> None:
        super().__init__(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config
        )
        self._target = target
        self._state = state
        self._before = target.checkpoint(table).state

    def refresh(self) -> Table:
        """Read the table again between two attempts; raise `_Overtaken` after another run's export."""
        table = super().refresh()
        if self._target.checkpoint(table).state != self._before and not self._target.holds(
            table, self._state
        ):
            raise _Overtaken
        return table
