"""
The broker beside us: its Kafka API, its log directories, and how a log is trimmed.

In: files below the log directories, responses of the broker. Out: the segments of a log and their bytes,
trims, pins, and logs that are restored for a stopped broker.

Read in this order:

* `base`: the seam of a broker. `kafka` sends requests to a live one, with `kafka_protocol`,
  `kafka_topic_configs`, `kafka_quotas` and `kafka_errors`; `directory_broker` replaces a broker that does not
  run.
* `layout`: the seam of files on disk. `log_dir` and `segment_file` for Kafka; `redpanda_log_dir` and
  `redpanda_segment_file` for Redpanda. `local_errors`: the system's errors, with the name of the file.
* `pins`, `watch`: closed segments that are held, and hints of changes.
* `disk_use`, `ballast_file`, `host_load`: the disks and the machine.
* `kafka_tail`, `kafka_deletion`, `kafka_target`, `restored_log`, `stopped_broker`: reads, deletions and
  restores of commands.
"""
