"""Looking at a bucket for faults: segments, spilled parts, partitions, and objects that nobody names."""
