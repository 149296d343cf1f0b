"""Bytes to model and back, sans-I/O. Nothing here opens a file, awaits or reads a clock."""
