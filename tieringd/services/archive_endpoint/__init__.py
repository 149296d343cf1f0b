"""Kafka's protocol over a bucket alone: a reader's cluster of one node, with no broker behind it."""
