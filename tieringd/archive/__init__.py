"""
What a bucket holds of an archive: topics, manifests and segments, read and committed.

In: objects of the bucket (`storage`). Out: manifests, records, and commits by compare-and-swap. Nothing here
knows a broker: the daemon's rooms use this package, and so do the jobs on Spark.

Read `manifest_store` first (a manifest read and committed) and `spillover_manifests` (its older parts). Then
`archive_reader`, `segment_indexes` and `record_reader` (records by offset or time) and `catalog` (all topics
of a bucket). `object_joiner`, `merged_objects`, `segment_rewriter`, `rewriting_records` and `segment_swap`
replace segments by others, `retired_objects` deletes what was replaced, and `closing` ends the archiving of a
partition. `scrub` finds faults; `rebuild` makes manifests again from the objects.
"""
