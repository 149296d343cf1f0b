"""
The chunk cache on the local disk: whole files under their objects' names, crash-safe.

Read `cache_directory` first (files, part files, the walk at the start), then `accounts` (how large each file
is and when it was last read) and `faults` (what the disk refuses, in words).
"""
