"""
Rebuild manifests from the objects that they named.

Read `object_listing` first (what a listing and the records of rewritings say), then `stored_segments` (one
segment, found out from its objects), `erasure_records` (what erasures have told of partitions) and
`manifest_writer` (the rebuilt manifest, stored).
"""
