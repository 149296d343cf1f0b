"""
Export topics of an archive to Parquet files or Iceberg tables, incrementally and exactly once by offset.

`job.export` is the job; `parquet_target.ParquetTarget` and `iceberg_target.IcebergTarget` are its targets. A
run consists of rounds: `round_planning` divides the rest of each partition into portions, `work` writes each
portion on an executor, and the target commits the round as a whole or not at all.
"""
