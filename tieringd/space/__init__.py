"""
The local disks: how full they are, which logs give way, and what happens when a disk is nearly full.

In: sizes of filesystems and log directories, observations of partitions, states of other brokers. Out:
requests to archivers to trim, the size of the chunk cache, the ballast file, lower quotas for producers.

Read in this order:

* `space_manager`: a plan for the logs of each filesystem, from the facts of each partition.
* `disk_monitor`: free and total bytes, and the alert that the next three act on.
* `degraded_mode`, `producer_brake`: no client writes while the disk of a broker is full. The brokers'
  daemons publish the states of their disks to each other through a board in the bucket.
* `ballast`: the file that is deleted to make room.
"""
