"""annotated_transformer: harvardnlp's Annotated Transformer."""
