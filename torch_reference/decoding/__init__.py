"""Text from a model: beam search, sampling, and the log-probabilities of given translations."""
