"""Checkpoints of a run and its directory."""
