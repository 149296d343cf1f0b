"""Scan a bucket for faults: in segments, spilled parts and partitions, and objects that no manifest names."""
