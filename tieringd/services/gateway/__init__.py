"""The read gateway: Kafka connections passed on to the broker, with the archive where it has more to say."""
