"""A translator behind HTTP: requests wait in a queue, and one thread translates them in batches."""
