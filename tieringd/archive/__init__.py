"""
What a bucket holds of an archive: topics, manifests and segments, read and committed.

Knows nothing of a broker. The daemon's services stand on it, and so do Spark's jobs.
"""
