"""Training: objectives, optimiser, augmentation, resumable state and the loop."""
