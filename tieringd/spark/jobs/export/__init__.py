"""
Export: topics of an archive as Parquet files or Iceberg tables, incremental and exactly once by offset.

`job.export` is the job, `parquet_target.ParquetTarget` and `iceberg_target.IcebergTarget` are the places it
exports to. A run goes in rounds: `round_planning` cuts what is left of each partition into portions,
`work` writes each of them on an executor, and the target makes the round count, or not, as a whole.
"""
