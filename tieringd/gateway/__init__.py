"""
The read gateway: passes Kafka connections on to the broker, and adds what only the archive has.

In: connections of clients, and the broker's responses to them. Out: the broker's bytes unchanged, and
answers from the archive where the broker reports an offset out of range.

Read in this order:

* `server`, `connection`: a client from its first byte to its last, and the gateway's settings.
* `wire`, `frames`: bytes of a socket, cut into messages, and the budget, pipes and rates that bound them.
* `requests`, `responses`: the few messages that the gateway reads or changes.
* `combined_answers`, `ahead`: the broker's response and the archive's, made into one.
* `archive_answers`: what the gateway may ask of the archive. `remote_answers` answers, with
  `archive_reads` (the reads that clients wait for), `readable_partitions` (which partitions, and where
  their logs begin) and `current_bounds` (where the broker's logs end now).
"""
