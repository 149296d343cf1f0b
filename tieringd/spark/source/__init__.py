"""
The data source `tieringd`: archived topics with the columns of Spark's own Kafka source.

options, positions      the user's options
settings                where the archive is, and the credentials to reach it
topics, offsets         which partitions exist, and the offsets to read of each
segment_spans, planning the segments that hold these offsets, and their division into tasks
task_reader             a task's work on an executor
batch, stream           Spark's two kinds of reader, made by `data_source`
"""
