"""
The only place that builds and starts things: the daemon, the archive endpoint, and the parts of commands.

In: a configuration. Out: opened parts that are given to each other, and closed in the reverse order.

Read in this order:

* `app`: the daemon's life, from its start to its stop, with what a reload of the configuration changes.
* `assembly`: a daemon's parts; `state_lock` is the lock that it holds. `local_broker` opens the broker,
  `archive` the bucket, `file_archive` a directory that replaces a bucket.
* `workers`: the processes that serve a gateway's clients, where it has some.
* `gateway_service`, `disks`, `housekeeping_jobs`, `scrubbing`: one builder for each room.
* `archive_endpoint`: the endpoint without a broker, built and run.
* `admin`, `certificates`: what daemon and endpoint show to operators. `space_preview`: one plan for the
  disks, for a command.
"""
