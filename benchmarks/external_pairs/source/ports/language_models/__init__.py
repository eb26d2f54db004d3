"""Ports of language models that are decoders alone."""
