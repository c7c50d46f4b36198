"""The audit of one model: the record directory, and the run that fills it."""
