"""The broker beside us: its Kafka API, its log directories, and how a log is trimmed."""
