"""
The data source `tieringd`: an archive as Spark's own Kafka source would show the topics.

options, positions      what a user asks for
settings                where the archive is, and as whom to reach it
topics, offsets         which partitions there are, and from where to where each is read
segment_spans, planning which segments that takes, and how they are shared among tasks
task_reader             what a task does, on an executor
batch, stream           the two readers that Spark knows, of one `data_source`
"""
