"""
How archived bytes reach a reader: from the bucket, through the chunk cache on the local disk.

In: a partition's manifest, an offset, a limit in bytes. Out: whole record batches, in an open file of
the cache where possible; or decoded records, for commands.

Read in this order:

* `partition_reader`: one read of one partition, as batches.
* `hydrator`: one chunk, shared by all its readers, from the cache or downloaded. `chunk_download`
  downloads it, within the budget of bytes in memory.
* `index_cache`: the indexes that say where a chunk begins, kept as files of the cache.
* `cache_keeper`: how the cache stays within its limits, and which of its files stay open.
* `history`: the older archives that a restored topic continues, and records over all of them.
"""
