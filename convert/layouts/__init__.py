"""Foreign checkpoints: for each layout one table of rules between its names and ours."""
