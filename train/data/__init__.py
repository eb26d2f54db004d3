"""From text to batches: corpora, tokenizers, shapes of batches, and their order."""
