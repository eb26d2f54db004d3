"""Training in JAX."""
