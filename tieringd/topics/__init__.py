"""
Which topics are archived, and what the bucket records of each of them.

In: topic manifests of the bucket, topic configurations of the broker. Out: for every other room, the
manifest of each topic; to the bucket, the values that a topic began with, the retention that the
broker had, and deletions of records that an operator asked for.

Read in this order:

* `topic_registry`: lists the topic manifests, and reads those that changed.
* `topic_defaults`: records the values with which a topic begins.
* `retention_manager`: sets the broker's retention of a managed topic to unlimited, and restores it.
* `record_deleter`: deletes a topic's records before an offset, in both tiers, for a command.
"""
