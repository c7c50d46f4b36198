"""Models: attention layers, transformers, checkpoints, and the recording of what attention does."""
