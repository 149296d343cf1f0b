"""
How archived bytes reach a reader: from the bucket, through the chunk cache on the local disk.

In: a partition's manifest, an offset, a limit in bytes. Out: whole record batches, in an open file of the
cache where possible; or decoded records, for commands.

Read in this order:

* `partition_reader`: one read of one partition, as batches.
* `hydrator`: one chunk for all who read it, from the cache or downloaded; `chunk_download`, `byte_budget`.
* `index_cache`, `cached_files`: the indexes that say where a chunk begins.
* `cache_keeper`, `open_chunks`: how the cache stays within its limits, and which of its files stay open.
* `history`, `log_reader`: the older archives that a restored topic continues, and records over all of them.
"""
