"""The PySpark data source and its jobs. Imports model, formats, storage and config only."""
