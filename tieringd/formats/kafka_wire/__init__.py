"""
The parts of Kafka's protocol that the read gateway inspects while messages pass.

kio decodes and encodes small messages. This package reads by hand what kio can only read whole: the head
of every request, Fetch and Produce. Records are never read. Every length is checked against its message
before it is used, and no allocation is larger than the bytes that have arrived.
"""
