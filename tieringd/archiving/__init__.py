"""
From a closed segment in the log directory to the committed manifest, and on to the trimmed local log.

In: log directories, leadership and topic configurations of the broker, manifests of the bucket. Out: data
and index objects, manifests that name them, trims of the local log, and pins.

Read in this order:

* `reconciler`: keeps one archiver for each partition that this broker leads. A round begins with
  `observer`, which makes an `Observation` of each partition. `pinner` and `manifest_upkeep` (with its
  `FollowedManifests`) act on it. `resting` tells which archivers need no step, and which partitions changed.
* `archiver`: one step of one partition, on its `claim` (the manifest under one leader epoch).
  `missing_offsets` has gaps and holes, `partition_status` the gauges. `claim` also queues the changes that
  housekeeping prepares and the archiver commits. `lineage_keeper` comes before the upload and keeps the
  manifest small.
* `uploader`, `remote_log`, `segment_copier`: the copy of a segment. `upload_gate` and `upload_controller`
  decide when it begins, and `upload_queue` which one is next; `tombstone_keeper` adds to it.
* `trimmer`: the local log, and the hint that is published before a trim. `archive_retention`: the archive
  itself. `user_deletions` finds what a user deleted at the broker. `partition_logger` names the partition in
  the events of all of them.
"""
