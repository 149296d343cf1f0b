"""
The read gateway: Kafka connections passed on to the broker, with the archive where it has more to say.

In: connections of clients, and the broker's answers to them. Out: the broker's bytes as they are, and answers
from the archive where the broker says that an offset is out of range.

Read in this order:

* `server`, `settings`, `opening`, `connection`: a client from its first byte to its last.
* `wire`, `pipes`, `frames`: bytes of a socket, cut into messages. `budget` and `read_rates` bound them.
* `requests`, `refusal`, `pending`, `responses`: the few messages that the gateway reads or changes.
* `answers`, `answer`, `ahead`: the broker's answer and the archive's, made into one.
* `archive_answers`: what the gateway may ask of the archive. `remote_answers` answers, with `archive_reads`
  (Fetch), `log_starts` and `readable_partitions`.
"""
