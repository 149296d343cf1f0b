"""
`tieringd demo`: the main job, shown and checked, on a directory without a broker.

A writer plays the broker; a real `tieringd run` archives what it writes; at the end every
record is read back and compared. `session` knows neither the writer nor the store, so the
same demo runs beside a real broker.
"""
