"""Ready-made models and runs by name. Imports neither jax nor torch."""
