"""From text to batches: corpora, tokenizers, batch shapes and batch order."""
