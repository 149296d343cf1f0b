"""
Work on the archive that waits for an idle object store: merging, re-upload, scrubbing, purging.

In: manifests as the archivers know them, the bucket's listing, local logs. Out: objects that replace
others, changes of manifests that the partition's archiver commits, objects moved to quarantine, purged
topics.

Read in this order:

* `service`, `partition_sweep`: which job has a turn, how much it may do, and how it goes over the partitions.
* `merging`: neighbouring small segments become one.
* `reupload`: segments that the broker compacted replace their originals.
* `scrub`, `healer`: faults are found and repaired.
* `bucket_quarantine`: objects that no manifest names wait here until they are deleted.
* `topic_purge`: the archives of deleted topics.
"""
