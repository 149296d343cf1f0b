"""
The archive in a bucket: its topics, manifests and segments, read and committed.

In: objects of the bucket (`storage`). Out: manifests, records, and commits by compare-and-swap. Nothing
here knows a broker: the daemon's rooms use this package, and so do the jobs on Spark.

Read `manifest_store` first (a manifest read, committed and closed) and `spillover_manifests` (its older
parts). Then `archive_reader` and `record_reader` (records by offset or time) and `catalog` (all topics of a
bucket). `object_joiner`, `segment_rewriter` and `segment_swap` replace segments by others;
`record_deletion` moves an archive's start over records that a user deleted. `retired_objects` deletes
replaced segments. `scrub` finds faults; `rebuild` makes manifests again from
the objects.
"""
