"""Estimates of how attention reacts to its input: branch gradients and their alignment, Lipschitz constants."""
