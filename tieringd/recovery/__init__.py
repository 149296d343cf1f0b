"""
Archives brought to another place: a stopped broker's log directory, another cluster, or another bucket.

In: manifests and objects of a bucket. Out: a log directory that a broker can start from, records in
topics of another cluster, or the same archive in another bucket.

Read in this order:

* `restorer`: one partition into a log directory, with its original offsets.
* `republisher`: the records of one partition into another cluster, with new offsets.
* `archive_mover`, `partition_mover`: an archive, and a partition with its objects, to another bucket.
"""
