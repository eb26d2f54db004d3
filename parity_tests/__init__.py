"""The proof that two models are one function."""
