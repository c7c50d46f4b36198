"""Images with labels, read into memory: embedded digits, and Parquet files of encoded images."""
