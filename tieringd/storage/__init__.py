"""
Object stores behind one seam: memory, file, S3, Cloud Storage and Azure; retries and limits in one wrapper.

In: keys, bytes and slices of files. Out: objects, versions, listings, and errors of one tree.

Read in this order:

* `base`: the seam. `store_opening`: from a configuration to a store, with the `store_settings` of each cloud.
* `resilient`: retries, deadlines and limits. `checked_puts`: trials of a store's checksums and conditions.
  `archive_clock`: the host's clock, compared with the times in the store's responses.
* `memory`; `file` with `file_root`, `file_tree` and `known_roots`.
* `s3`, `gcs`, `azure`: the clouds, on `calls` (one request), `body` and `receive` (large bodies),
  `tls_transport` and `threads`.
* `store_times`: reads the times in a store's responses. `at_once`: several requests at once. `background`:
  marks requests that can wait. `single_flight`: work that several callers share. `listing`: every page of a
  listing. `work_file`: a temporary file for an object that is put together on this host.
"""
