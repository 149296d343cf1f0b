"""
`tieringd demo`: show and check the main job, on a directory without a broker.

A writer plays the broker, and a real `tieringd run` archives what it writes. At the end the demo reads
every record back and compares it. `demo_session` depends neither on the writer nor on the store, so the same
demo runs beside a real broker.
"""
