"""
The Iceberg table of one topic: found or made through a catalogue, and committed to once for each round.

Data files and the offsets reached are one commit: the offsets are in the properties of the snapshot, and in
those of the table, for when snapshots expire. What a table holds is told by its newest snapshot that has
offsets, so a table that is rolled back is exported to from where it was then. Two runs at once are kept
apart by Iceberg's own rule: a commit is on top of the snapshot that it was made from, or fails.

`without_secrets` takes the values of a catalogue's secret properties out of errors: catalogues put them
into theirs.
"""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote, urlsplit

from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table

from tieringd.errors import ConfigError, StorageUnavailable, TieringError
from tieringd.spark.jobs.export.iceberg_layout import (
    SCHEMA,
    partition_spec,
    schema_differences,
    spec_difference,
)
from tieringd.spark.jobs.export.state import parse_state
from tieringd.spark.jobs.export.topic_target import Standing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table.snapshots import Snapshot

    from tieringd.spark.jobs.export.iceberg_layout import IcebergPartitioning
    from tieringd.spark.jobs.export.state import ExportState


_IS_SECRET: Final = re.compile(r"secret|token|passw|credential|connection|key|sas|auth", re.IGNORECASE)
"""In a property's name. What is hidden without need does little harm."""

STATE_PROPERTY: Final = "tieringd.export"
"""Of snapshots and of the table."""
SEQUENCE_PROPERTY: Final = "tieringd.export-sequence-number"
"""Of the table: that of the snapshot which the state of the table's property belongs to, or one before it."""


def without_secrets(text: str, properties: Mapping[str, Any]) -> str:
    """Return *text* with asterisks for the secrets of *properties*, and of properties in them."""
    for secret in sorted({*_secrets(properties)}, key=len, reverse=True):
        for written in (secret, repr(secret)[1:-1], quote(secret, safe="")):
            text = text.replace(written, "***")
    return text


def _secrets(properties: Mapping[str, Any]) -> Iterator[str]:
    for name, value in properties.items():
        if isinstance(value, dict):
            yield from _secrets(value)
            continue
        if _IS_SECRET.search(name) and value:
            yield str(value)
        try:
            password = urlsplit(str(value)).password
        except ValueError:
            continue
        if password:
            yield password
            yield unquote(password)


class IcebergTable:
    """A table that exports of one topic are committed to."""

    def __init__(self, catalog: Catalog, identifier: tuple[str, ...]) -> None:
        self._catalog = catalog
        self._identifier = identifier
        self.name = ".".join(identifier)

    def opened(self, partition_by: IcebergPartitioning) -> Table:
        """
        Return the table as it is now; one that is missing is made.

        Raises:
            ConfigError: There is one that our rows do not fit into.
            StorageUnavailable: The catalogue does not answer, or not as expected.
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
                f"table {self.name} has another layout than an export: {'; '.join(differences)}",
                hint="Export to a table of its own",
            )
        return table

    def standing(self, table: Table) -> Standing:
        """
        Return where the export stands in *table*.

        Raises:
            ConfigError: It holds rows that no export of ours has put there, or was rolled back, and what
                tells how far it was exported then has expired.
        """
        lineage = _lineage(table)
        if not lineage:
            return Standing(None, version=table)
        found = next(filter(None, map(_state_in, lineage)), None)
        if found is None:
            found = table.properties.get(STATE_PROPERTY)
            self._require_not_rolled_back(table, lineage[-1])
        if found is None:
            raise ConfigError(
                f"table {self.name} holds rows that no export of tieringd put there: what would be appended "
                "may be among them already",
                hint="Export to a table of its own",
            )
        return Standing(parse_state(found, source=f"table {self.name}"), version=table)

    def _require_not_rolled_back(self, table: Table, oldest: Snapshot) -> None:
        """
        Return when the snapshot of the table's state may be an ancestor of the *oldest* that is remembered.

        Raises:
            ConfigError: It was committed after that one, or the property that tells is not what we write.
        """
        text = table.properties.get(SEQUENCE_PROPERTY, "0")
        try:
            exported_in = int(text)
        except ValueError as error:
            raise ConfigError(
                f"table {self.name} has {text!r} for its property {SEQUENCE_PROPERTY}, and that is no number",
                hint="If the table was not rolled back since the last export, remove the property: the next "
                "commit sets it again",
            ) from error
        if (oldest.sequence_number or 0) < exported_in:
            raise ConfigError(
                f"table {self.name} was rolled back to a snapshot before the last export, and the snapshots "
                "that tell how far it was exported by then have expired",
                hint="Roll it forward where that can be, or export to a new table",
            )

    def commit(self, table: Table, state: ExportState, files: Sequence[DataFile]) -> bool:
        """
        Append *files* to *table*, and make *state* its state; False where another run was faster.

        Raises:
            StorageUnavailable: It is not known to have taken effect, or others kept changing the table.
        """
        properties = {STATE_PROPERTY: state.as_json()}
        # A commit that is repeated gets a later one: never is a table taken to be older than it is.
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
                f"table {self.name} is being changed by others all the time; nothing was appended",
                hint="Export again later",
            ) from error
        # Whatever else a catalogue or its transport raises: the commit may have taken effect.
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
        """Say whether a commit of *state* is among those that led to the current snapshot of *table*."""
        text = state.as_json()
        return any(_state_in(snapshot) == text for snapshot in _lineage(table))

    def _created(self, partition_by: IcebergPartitioning) -> Table:
        namespace = self._identifier[:-1]
        try:
            self._catalog.create_namespace_if_not_exists(namespace)
        except Exception:
            # Another run may have been faster; what catalogues say of that is of many kinds.
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
        """Give every error of a catalogue, of which each kind has its own, the same class."""
        try:
            yield
        except TieringError:
            raise
        except Exception as error:
            raise StorageUnavailable(
                f"the Iceberg catalogue {self._catalog.name} failed to {what} table {self.name}: "
                f"{without_secrets(repr(error), self._catalog.properties)}",
                hint="Look at the catalogue's properties, and whether it can be reached",
            ) from error


def _lineage(table: Table) -> list[Snapshot]:
    """Return the snapshots that led to the current one, newest first, as far as they are remembered."""
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
    """Another run has exported meanwhile."""


class _Watched(Table):
    """
    A table that a commit of *state* is not repeated on once another run has committed to it.

    When a commit fails since someone else was faster, pyiceberg reads the table again and appends the same
    files on top. That is right after a compaction, and not after another export of the same records.
    """

    def __init__(self, target: IcebergTable, table: Table, state: ExportState) -> None:
        super().__init__(
            table.name(), table.metadata, table.metadata_location, table.io, table.catalog, table.config
        )
        self._target = target
        self._state = state
        self._before = target.standing(table).state

    def refresh(self) -> Table:
        """Read the table again, in between two tries."""
        table = super().refresh()
        if self._target.standing(table).state != self._before and not self._target.holds(table, self._state):
            raise _Overtaken
        return table
