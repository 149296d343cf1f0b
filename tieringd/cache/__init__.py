"""The local chunk cache."""
