"""leftover: a hand-written Transformer of 2025, opus_books, English to Italian."""
