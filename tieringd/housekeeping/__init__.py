"""
Work on the archive that waits for an idle object store: merging, re-upload, scrubbing, purging.

In: manifests as the archivers know them, the bucket's listing, local logs. Out: objects that replace others,
changes of manifests that the partition's archiver commits, objects moved to quarantine, purged topics.

Read in this order:

* `service`, `job`, `traffic_watch`, `partition_passes`: which job has a turn, and how much it may do.
* `merge_job`, `segment_merger`: neighbouring small segments become one.
* `reupload_job`, `compacted_reuploader`: segments that the broker compacted replace their originals.
* `scrub_job`, `scrub_parts`, `healer`, `index_rebuild`, `local_bytes`: faults are found and mended.
* `object_quarantine`, `quarantine_expiry`, `quarantine_report`: objects that no manifest names wait, then go.
* `topic_purge`, `topic_purger`: the archives of deleted topics.
"""
