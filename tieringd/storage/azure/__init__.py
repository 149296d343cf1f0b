"""Azure Blob storage and ADLS Gen2."""
