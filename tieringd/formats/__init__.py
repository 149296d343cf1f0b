"""
Bytes to model and back, sans-I/O. Nothing here opens a file, awaits or reads a clock.

In: bytes in any buffer of the caller, or values of `model`. Out: values for bytes and bytes for values, or a
`CorruptDataError`.

* the broker's files: `log_names`, `checkpoints`, `index_files`; batches in `record_batch`, `records`,
  `compression` and `transactions`; whole segments in `segment_scan`, `batch_check`, `batch_offsets`
  and `restored_batches`.
* Redpanda's files: `redpanda_names`, `redpanda_batch`, `redpanda_index`, and `redpanda_reframe`, which
  makes Kafka segments.
* our objects: names in `object_keys`; `envelope`, `sidecar`, `manifest_codec`; JSON in `topic_manifest`,
  `history_link`, `disk_state`, `recovery_mark` and `job_records`, on `json_document`. `index_merge` and
  `crc32c_combine` join objects.
* the chunk cache: `cache_names`, `access_times`.
* Kafka's protocol: `kafka_wire`.
"""
