"""
Plain values: offsets, segments, manifests. This layer imports only `tieringd.errors`.

Read in this order:

* `partition`: names of partitions, and what a broker tells about a partition.
* `segment`, `local_log`: segments, and what one scan of the log directories saw of a partition.
  `offset_translation`: Redpanda's own offsets.
* `manifest` with `manifest_parts` and `segment_table`: which segments are in the object store.
* `spillover`, `spilling`: the oldest part of a long history, moved out of the manifest and taken back.
* `corrections`: manifests in which a detail is corrected.
* `topic_lifecycle`: deleted topics. `disk_state`: full disks, and the quotas that slow producers down.
"""
