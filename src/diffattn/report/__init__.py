"""The report: record directories in, figures and one self-contained HTML page out."""
