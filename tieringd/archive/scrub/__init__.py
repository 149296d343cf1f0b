"""
Scan a bucket for faults: in segments, spilled parts and partitions, and objects that no manifest names.

Read `segment_inspection` first (one segment, and a manifest by its segments; `data_scan` reads an object
whole), then `partition_scrub` with `spilled_chain` and `rewriting_records` (one partition), and
`orphan_search` and `survey` (a whole bucket). `data_scan` can also make a lost index again. Nothing here
changes the bucket.
"""
