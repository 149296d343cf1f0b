"""
Object stores behind one seam: memory, file, S3, Cloud Storage and Azure; retries and limits in one wrapper.

In: keys, bytes and slices of files. Out: objects, versions, listings, and errors of one tree.

Read in this order:

* `base`: the seam. `opening`: from a configuration to a store, with the `settings` of each cloud.
* `resilient`: retries, deadlines and limits. `checked_puts`: what a store's word is worth. `archive_clock`:
  what its answers tell of the time.
* `memory`; `file` with `file_root`, `file_tree` and `known_roots`.
* `s3`, `gcs`, `azure`: the clouds, on `calls` (one request), `body` and `receive` (large bodies),
  `tls_transport` and `threads`.
* `store_times`: the clock in a store's answers. `at_once`, `background`: several requests at once, and
  requests that can wait.
"""
