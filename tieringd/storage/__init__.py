"""Object stores behind one seam: memory, file, S3; retries and limits in one wrapper."""
