"""
From a closed segment in the log directory to the committed manifest, and on to the trimmed local log.

In: log directories, leadership and topic configurations of the broker, manifests of the bucket. Out: data and
index objects, manifests that name them, trims of the local log, and pins.

Read in this order:

* `reconciler`: keeps one archiver for each partition that this broker leads. A round begins with `observer`,
  which makes an `observation` of each partition. `pinner`, `bookkeeper` and `follower` work beside it,
  `resting` tells which archivers need no step.
* `archiver`: one step of one partition, on its `claim` (the manifest under one leader epoch).
  `lineage_keeper`, `hole_watch`, `gap_recorder`, `quarantine` and `upload_times` come before the upload.
* `uploader`, `remote_log`, `segment_copier`: the copy of a segment. `upload_line`, `upload_gate`,
  `upload_controller` and `load_watch` decide when it begins; `tombstone_keeper` and `side_files` add to it.
* `hint_publisher`, `trimmer`: the local log. `archive_retention`, `archive_cleanup`: the archive itself.
* `change_queue`, `manifest_change`: what housekeeping prepares and the archiver commits. `spiller` keeps the
  manifest small; `partition_gauges` and `step_result` report, and `change_feed` tells which partitions
  changed; `remote_index` is a follower's view.
"""
