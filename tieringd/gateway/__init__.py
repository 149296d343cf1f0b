"""
The read gateway: Kafka connections passed on to the broker, with the archive where it has more to say.

In: connections of clients, and the broker's answers to them. Out: the broker's bytes as they are, and
answers from the archive where the broker says that an offset is out of range.

Read in this order:

* `server`, `opening`, `connection`: a client from its first byte to its last, and the gateway's settings.
* `wire`, `frames`: bytes of a socket, cut into messages, and the budget, pipes and rates that bound them.
* `requests`, `pending`, `responses`: the few messages that the gateway reads or changes.
* `answers`, `ahead`: the broker's answer and the archive's, made into one.
* `archive_answers`: what the gateway may ask of the archive. `remote_answers` answers, with
  `readable_partitions` (which partitions, and where their logs begin).
"""
