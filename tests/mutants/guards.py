"""
The guards of the code, and what each of them is replaced by to see whether the simulation notices.

A guard is a few lines of `tieringd` on which a promise rests. Its text is here exactly as it stands there,
and has to be found in its file exactly once: a change to a guard is a change to this table too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class GuardNotFoundError(Exception):
    """The text of a guard is not in its file, or is there more than once."""


@dataclass(frozen=True)
class Edit:
    """One text of a file, and what takes its place."""

    file: str
    """From the repository's root."""
    text: str
    replacement: str

    def applied(self, source: str) -> str:
        """
        Return *source* with the replacement in the place of the text.

        Raises:
            GuardNotFoundError: The text is not there exactly once.
        """
        found = source.count(self.text)
        if found != 1:
            raise GuardNotFoundError(f"guard not found in {self.file}: {self.text!r} is there {found} times")
        return source.replace(self.text, self.replacement)


@dataclass(frozen=True)
class Guard:
    """A guard, and the way to take it out."""

    name: str
    promise: str
    """What holds because of it."""
    edits: tuple[Edit, ...]
    """More than one where a second check would do the work of the first."""
    worlds: tuple[str, ...]
    """The simulated worlds that may notice, the likeliest first."""
    theme: str = ""
    """The theme of the squalls, or of the gusts, that are likeliest to notice."""


def guard(
    name: str,
    file: str,
    text: str,
    replacement: str,
    promise: str,
    *others: Edit,
    worlds: tuple[str, ...] = (),
    theme: str = "",
) -> Guard:
    """Return a guard that is in one place, or first in this one; themes are of squalls without a world."""
    edits = (Edit(file, text, replacement), *others)
    return Guard(name, promise, edits, worlds or (SQUALL if theme else EVERYWHERE), theme)


_ARCHIVING = "tieringd/archiving"
_ENDPOINT = "tieringd/endpoint"
_POLICIES = "tieringd/policies"
_UNLESS_CURRENT = (
    "        if not await self._is_current():\n            self.is_put_off = True\n            return 0\n"
)
EVERYWHERE = ("storm", "cluster", "broker")
STORM = ("storm",)
SQUALL = ("squall",)
GUST = ("gust",)
GROUPS = ("groups",)
NEWER_GROUPS = ("newer_groups",)
BROKER = ("broker", "storm", "cluster")
COMPACTED = ("compacted",)

GUARDS: tuple[Guard, ...] = (
    # Leadership, and the right to write.
    guard(
        "commit-version",
        "tieringd/archive/manifest_store.py",
        "signed, IfAbsent() if stored.version is None else IfVersion(stored.version)",
        "signed, None",
        "A commit replaces only the version that it was made from",
    ),
    guard(
        "claim-at-once",
        f"{_ARCHIVING}/claim.py",
        "if found is None or found.leader_epoch < leader_epoch:",
        "if found is None:",
        "A new leader claims the manifest before it does anything else",
    ),
    guard(
        "older-epoch-is-fenced",
        f"{_ARCHIVING}/claim.py",
        "if found is not None and found.leader_epoch > leader_epoch:",
        "if False:",
        "A leader of an older epoch stops when a newer one owns the manifest",
        Edit(
            "tieringd/archive/manifest_store.py",
            "if stored.manifest is not None and stored.manifest.leader_epoch > leader_epoch and not reopens:",
            "if False:",
        ),
        Edit(f"{_POLICIES}/lineage.py", "if manifest.leader_epoch > leader_epoch:", "if False:"),
    ),
    guard(
        "rival-at-the-second-commit",
        f"{_ARCHIVING}/claim.py",
        "if self._rival_commit not in {None, commit}:",
        "if True:",
        "A late commit of a process that has ended fences no process",
        worlds=STORM,
    ),
    guard(
        "rival-is-fenced",
        f"{_ARCHIVING}/claim.py",
        "if self._rival_commit not in {None, commit}:",
        "if False:",
        "Two daemons beside one broker do not both go on",
        worlds=("pair",),
    ),
    guard(
        "own-commit-is-known",
        "tieringd/archive/manifest_store.py",
        "        if found.manifest == signed:\n            return found\n"
        "        if found.version == stored.version:\n"
        "            raise StorageUnavailable(",
        "        if found.version == stored.version:\n            raise StorageUnavailable(",
        "A commit whose answer was lost is recognised, and stands",
        Edit(
            "tieringd/archive/manifest_store.py",
            "if found.manifest is not None and found.manifest.writer_id == self._writer_id:",
            "if False:",
        ),
        worlds=STORM,
    ),
    guard(
        "refusal-of-unchanged-version",
        "tieringd/archive/manifest_store.py",
        "        if found.version == stored.version:\n            raise StorageUnavailable(",
        "        if False:\n            raise StorageUnavailable(",
        "A store that refuses a commit although nothing changed fences no process",
        Edit(
            "tieringd/archive/manifest_store.py",
            "if found.manifest is not None and found.manifest.writer_id == self._writer_id:",
            "if False:",
        ),
        theme="refused commits",
    ),
    # What may be appended.
    guard(
        "lineage",
        f"{_POLICIES}/lineage.py",
        "    newest = manifest.epochs[-1][0]\n    reopened =",
        "    divergence, newest = tail_end, manifest.epochs[-1][0]\n    reopened =",
        "What the leader's log does not hold is cut off the archive before it grows",
    ),
    guard(
        "reopened-transaction",
        f"{_POLICIES}/lineage.py",
        "    if not manifest.crossing or not log.epochs:\n        return None\n    newest",
        "    if True:\n        return None\n    newest",
        "A transaction whose marker was cut off is archived anew",
    ),
    guard(
        "undecided-from",
        f"{_ARCHIVING}/lineage_keeper.py",
        "return judge(undecided_from=min(still_open.values(), default=None))",
        "return plan",
        "A transaction that is open at a divergence is archived anew as a whole",
        theme="transactions that cross",
    ),
    guard(
        "only-in-the-archive",
        f"{_ARCHIVING}/lineage_keeper.py",
        "if _keeps_good_part(plan.replacement, seen):",
        "if False:",
        "Good records that only the archive has are never cut off",
        theme="good part",
    ),
    guard(
        "log-that-began-anew",
        f"{_ARCHIVING}/lineage_keeper.py",
        "if plan.is_log_anew:\n            return await",
        "if False:\n            return await",
        "Not all of an archive goes without an operator, for a log that has no epoch in common with it",
    ),
    guard(
        "history-too-early",
        f"{_POLICIES}/lineage.py",
        'too_early = why_too_early(log, leader_epoch) if log.epochs else ""',
        'too_early = ""',
        "A log is judged only once its history has the leader's epoch",
        Edit(
            f"{_ARCHIVING}/lineage_keeper.py",
            "            if too_early:\n                return stored, too_early",
            "            del too_early",
        ),
        theme="early history",
    ),
    guard(
        "newer-epoch-never-committed",
        f"{_ARCHIVING}/segment_copier.py",
        "    if request.local_log.epochs and newest > leader_epoch:",
        "    if False:",
        "A segment with a batch of a newer epoch is never committed under an older one",
        Edit(
            f"{_ARCHIVING}/observer.py",
            "    if log.epochs and log.epochs[-1][0] > leader_epoch:",
            "    if False:",
        ),
        # A history that ends with another epoch than the leader's is refused whether it is older or newer.
        Edit(f"{_POLICIES}/lineage.py", "if newest != leader_epoch:", "if newest < leader_epoch:"),
        # The broker answers for the epoch that it is asked for: the simulated one stands in for it.
        Edit(
            "tests/simulation/cluster_broker.py",
            "if partition.heard[self._number][1] != leader_epochs[name]:",
            "if False:",
        ),
        theme="there and back",
    ),
    guard(
        "below-the-last-stable-offset",
        f"{_POLICIES}/upload_plan.py",
        "if segment.next_offset > bounds.last_stable_offset:",
        "if False:",
        "Nothing is archived at or above the last stable offset",
    ),
    guard(
        "batch-checksum",
        "tieringd/formats/segment_scan.py",
        "if checksum(view[position + CRC_STARTS_AT : end]) != crc:",
        "if False:",
        "A damaged batch is never archived",
        worlds=BROKER,
    ),
    # Gaps and holes.
    guard(
        "gap-needs-two-scans",
        f"{_ARCHIVING}/missing_offsets.py",
        "        if self._missed is None or not _covers(self._missed[1], missing):",
        "        if False:",
        "A gap is recorded only when two scans have missed the offsets",
        Edit(
            f"{_ARCHIVING}/missing_offsets.py",
            "        if self._missed[0] == seen.scan_number:",
            "        if False:",
        ),
        theme="torn scans",
    ),
    guard(
        "gap-scans-have-numbers",
        f"{_ARCHIVING}/missing_offsets.py",
        "        if self._missed[0] == seen.scan_number:",
        "        if False:",
        "One scan never counts as two for a gap",
        worlds=GUST,
        theme="asked again",
    ),
    guard(
        "hole-scans-have-numbers",
        f"{_ARCHIVING}/missing_offsets.py",
        "return frozenset(hole for hole, first in self._first_scans.items() if first != self._scan_number)",
        "return frozenset(self._first_scans)",
        "A transaction counts as aborted for a hole only when two scans have found it",
        theme="torn and crossing",
    ),
    guard(
        "no-cut-with-new-holes",
        f"{_ARCHIVING}/lineage_keeper.py",
        "        if new_holes:",
        "        if False:",
        "Nothing is cut off while one scan alone has found a hole in the log",
        theme="torn and crossing",
    ),
    # Trims.
    guard(
        "is-current-before-trim",
        f"{_ARCHIVING}/trimmer.py",
        f"{_UNLESS_CURRENT}        # The",
        "        # The",
        "A deposed leader trims nothing that its successor has cut off",
        Edit(
            f"{_ARCHIVING}/trimmer.py",
            "if not await self._record(before_offset, is_stored_end=is_stored_end):",
            "if False:",
        ),
        theme="deposed unheard",
    ),
    guard(
        "is-current-before-expired-trim",
        f"{_ARCHIVING}/trimmer.py",
        f"{_UNLESS_CURRENT}        closed",
        "        closed",
        "A deposed leader trims nothing by an archive start of before",
        worlds=GUST,
        theme="expired unheard",
    ),
    guard(
        "checksum-before-trim",
        f"{_ARCHIVING}/trimmer.py",
        "if self._proved.get(local.base_offset) != local.identity:",
        "if False:",
        "Only a file with the archive's bytes is trimmed",
        theme="bad disks",
    ),
    guard(
        "proof-is-of-this-file",
        f"{_ARCHIVING}/trimmer.py",
        "if self._proved.get(local.base_offset) != local.identity:",
        "if local.base_offset not in self._proved:",
        "A checksum counts only for the file that it was taken of",
        theme="bad disks",
    ),
    guard(
        "trim-only-what-is-durable",
        f"{_POLICIES}/durability.py",
        "    if covered_to < segment.next_offset:\n        return",
        "    if not pieces:\n        return",
        "Nothing past the archive's end is trimmed",
        Edit(
            f"{_ARCHIVING}/trimmer.py",
            "if self._proved.get(local.base_offset) != local.identity:",
            "if False:",
        ),
    ),
    guard(
        "trim-waits-for-replicas",
        f"{_ARCHIVING}/trimmer.py",
        "needs_every_replica=seen.topic.may_elect_uncleanly and not is_urgent,",
        "needs_every_replica=False,",
        "What a replica that is not in sync could replace is not trimmed",
        theme="lagging followers",
    ),
    guard(
        "trim-is-recorded",
        f"{_ARCHIVING}/trimmer.py",
        "if not await self._record(before_offset, is_stored_end=is_stored_end):",
        "if False:",
        "A trim of ours is never taken for a user's DeleteRecords",
        Edit(
            "tieringd/model/manifest.py",
            "return replace(self.with_trim(trims_to), allowed_local_start_offset=offset)",
            "return replace(self, allowed_local_start_offset=offset)",
        ),
        worlds=GUST,
        theme="late trims",
    ),
    guard(
        "trim-shows-all-that-goes",
        f"{_ARCHIVING}/trimmer.py",
        "return 0 if _lacks_head(seen) else await self._trim(manifest, seen)",
        "return await self._trim(manifest, seen)",
        "An observation that lacks the log's first files trims nothing",
        theme="bad disks",
    ),
    # Pins.
    guard(
        "pin-until-durable",
        f"{_POLICIES}/pinning.py",
        "        if segment.next_offset is not None and segment.next_offset > durable_to\n",
        "        if segment.next_offset is not None and segment.next_offset < durable_to\n",
        "What is closed and not durable is pinned",
    ),
    guard(
        "pin-of-another-log",
        f"{_POLICIES}/pinning.py",
        "        if pin.segment.base_offset < first_offset and _end(pin.segment) > same_to\n",
        "        if False\n",
        "A pin of another lineage is never uploaded",
        theme="begun anew",
    ),
    guard(
        "pin-of-a-replaced-file",
        f"{_POLICIES}/pinning.py",
        "        elif is_replaced:",
        "        elif False:",
        "A pin goes when the log has other bytes in its place",
    ),
    guard(
        "pins-by-a-fresh-scan",
        f"{_ARCHIVING}/pinner.py",
        "        if clock() > facts.good_until:\n            self._make_only",
        "        if False:\n            self._make_only",
        "A process that was stopped releases no pin by an old scan",
        worlds=GUST,
        theme="stopped before the pins",
    ),
    guard(
        "durable-by-lineage",
        f"{_POLICIES}/lineage.py",
        "    return _lineage_end(manifest, log)\n\n\ndef _lineage_end",
        "    return manifest.next_offset\n\n\ndef _lineage_end",
        "A pin is held while the archive has other records than the log",
        Edit(
            f"{_POLICIES}/lineage.py",
            "        return min(end, _lineage_end(manifest, log))",
            "        return manifest.next_offset",
        ),
        theme="replaced before archived",
    ),
    # Retention and time.
    guard(
        "retention-needs-two-checks",
        f"{_ARCHIVING}/archive_retention.py",
        "            up_to=first.start_offset if first else manifest.start_offset,\n",
        "",
        "Retention lets go only of what two checks agree on",
        worlds=GUST,
        theme="misread settings",
    ),
    guard(
        "ages-with-a-doubted-clock",
        f"{_POLICIES}/retention_time.py",
        "return NOTHING_IS_OLD_MS if self.doubt_after(committed_at_ms) else self.now_ms",
        "return self.now_ms",
        "Nothing goes by age while a clock is in doubt",
        worlds=("storm", "broker"),
    ),
    guard(
        "proof-of-upload-time",
        f"{_POLICIES}/retention_time.py",
        "    newest_ms = _newest_record_ms(segment)\n"
        "    if is_impossible(segment.uploaded_at_ms, now_ms=now_ms):\n"
        "        return True",
        "    newest_ms = _newest_record_ms(segment)\n    if True:\n        return False",
        "An upload time that a wrong clock noted is looked up before anything goes by it",
        worlds=GUST,
        theme="a store without a clock",
    ),
    guard(
        "delete-delay",
        f"{_ARCHIVING}/archive_retention.py",
        "self._gone_since.ms(one) + delay_ms <= ages_ms, free_retired(manifest)",
        "True, free_retired(manifest)",
        "Objects outlive what named them by the delete delay",
        worlds=BROKER,
    ),
    # Deletions by users.
    guard(
        "deletion-is-followed-later",
        f"{_ARCHIVING}/archiver.py",
        "return appended.following_deletion(now_ms=self._clock())",
        "return appended",
        "What users deleted before it was archived is hidden once it is",
        worlds=STORM,
    ),
    guard(
        "deletion-names-its-epoch",
        "tieringd/model/manifest.py",
        "        later = (start for epoch, start in self.epochs if epoch > deletion.leader_epoch)\n"
        "        return min(deletion.before_offset, min(later, default=deletion.before_offset))",
        "        return deletion.before_offset",
        "A deletion takes no records of a later leader",
        Edit(
            "tieringd/model/tail_cut.py",
            "    if deletion.leader_epoch >= leader_epoch or deletion.before_offset <= next_offset:",
            "    if True:",
        ),
        worlds=STORM,
    ),
    guard(
        "deletion-beside-another",
        "tieringd/model/manifest_parts.py",
        "        if not kept or one.leader_epoch > kept[-1].leader_epoch:",
        "        if not kept:",
        "A deletion under another leader epoch replaces no recorded one",
        theme="users overtaken",
    ),
    guard(
        "deletion-under-the-epoch-it-had",
        "tieringd/gateway/readable_partitions.py",
        "stored = await delete_archived(self._manifests, partition, deletion, now_ms=self._now_ms)",
        "deletion = replace(deletion, leader_epoch=found.manifest.leader_epoch)\n"
        "        stored = await delete_archived(self._manifests, partition, deletion, now_ms=self._now_ms)",
        "A deletion through a gateway that was overtaken by an election takes no records of the new leader",
        theme="users overtaken",
    ),
    # Objects of the store.
    guard(
        "read-back",
        "tieringd/storage/checked_puts.py",
        "        if not self.reads_back:\n            return True",
        "        if True:\n            return True",
        "What a store that takes checksums on trust has stored is read back",
        Edit(
            "tieringd/storage/checked_puts.py",
            "if info.crc32c is not None and info.crc32c != crc32c:",
            "if False:",
        ),
        worlds=STORM,
    ),
    guard(
        "merge-of-what-is-there",
        "tieringd/housekeeping/merging.py",
        "        return found == merge.parts",
        "        return True",
        "A merge is committed only in the place of just the segments that it was made of",
        worlds=GUST,
        theme="merges overtaken",
    ),
    guard(
        "named-objects-stay",
        "tieringd/policies/scrub.py",
        "    if is_named(owner, one.key):\n        return Keep.NAMED",
        "    if False:\n        return Keep.NAMED",
        "A scrub takes no object that a manifest names",
        worlds=GUST,
        theme="slow searches",
    ),
    guard(
        "trim-names-its-epoch",
        "tests/simulation/cluster_broker.py",
        "if (leader, leader_epoch) != (self._number, leadership.leader_epoch):",
        "if leader != self._number:",
        "A trim is carried out only under the leader epoch that it was decided under (`broker/kafka.py`; the "
        "simulated broker stands in for it)",
        theme="there and back",
    ),
    guard(
        "topic-manifest-before-trim",
        f"{_ARCHIVING}/observer.py",
        "topic if topic.never_trimmed_because else replace(topic, never_trimmed_because=_NOT_ON_RECORD)",
        "topic",
        "Nothing is trimmed before a topic manifest in the bucket counts its partition",
        worlds=GUST,
        theme="topics unrecorded",
    ),
    guard(
        "gap-with-what-follows",
        f"{_ARCHIVING}/archiver.py",
        "        begin = stored.existing if gap is None else stored.existing.with_gap(gap)\n"
        "        gaps = 0\n",
        "        if gap is not None:\n"
        "            stored, gap = await self._claim.commit(stored, stored.existing.with_gap(gap)), None\n"
        "        begin = stored.existing\n"
        "        gaps = 0\n",
        "A gap is committed together with what follows it",
        worlds=GUST,
        theme="gaps overtaken",
    ),
    guard(
        "begin-by-the-broker",
        f"{_ARCHIVING}/archiver.py",
        "return log_start_offset if first_offset is None else min(first_offset, log_start_offset)",
        "return log_start_offset if first_offset is None else first_offset",
        "An archive begins where the broker's log does, not where one scan finds its first file",
        worlds=STORM,
    ),
    guard(
        "quarantine-watches-the-damage",
        f"{_ARCHIVING}/uploader.py",
        "damaged = (one for one in local_log.segments if one.path == error.source)",
        "damaged = ()",
        "A partition that a damaged file holds back goes on once that file is mended",
        worlds=("pair", "broker"),
    ),
    # What a compaction drops.
    guard(
        "tombstone-while-it-hides",
        f"{_POLICIES}/record_removal.py",
        "    return readable_from is not None and read_from <= readable_from",
        "    return True",
        "A tombstone is dropped only where no older record of its key can be read",
        worlds=COMPACTED,
    ),
    # What keeps the commits of consumer groups.
    guard(
        "moved-member",
        f"{_ENDPOINT}/group_coordinator.py",
        "if before.was_here and member is not None and member.endpoint_id != self.endpoint_id:",
        "if False:",
        "An older commit of a member that went on at another endpoint is refused",
        worlds=GROUPS,
    ),
    guard(
        "closed-connection",
        f"{_ENDPOINT}/group_coordinator.py",
        "    if not source.is_connected():\n        return True\n",
        "",
        "A commit whose client has closed the connection is not carried out",
        worlds=GROUPS,
    ),
    guard(
        "overtaken-offsets",
        f"{_ENDPOINT}/group_coordinator.py",
        "    return any(one.overtaken.get(partition, 0) > before.finds for partition in source.memberless)",
        "    return False",
        "A commit without a member undoes none that another endpoint has taken meanwhile",
        worlds=GROUPS,
    ),
    guard(
        "confirmed-group",
        f"{_ENDPOINT}/group_coordinator.py",
        "                if is_confirmed:\n                    return replies\n",
        "                if True:\n                    return replies\n",
        "What one endpoint has acknowledged is what another one reads",
        worlds=GROUPS,
    ),
    guard(
        "told-again",
        f"{_ENDPOINT}/group_coordinator.py",
        "            is_again = True\n",
        "",
        "A partition is told although the answer of its write was lost",
        worlds=NEWER_GROUPS,
    ),
)
