"""tieringd: tiered storage beside a Kafka-API broker, without changing the broker."""

__version__ = "0.1.0"
