"""Experiments: studies made of training and auditing, the demo, and the findings."""
