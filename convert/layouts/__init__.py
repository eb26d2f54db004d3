"""Layouts of foreign checkpoints: for each, a table of rules between Flax names and its names."""
