"""Mistakes in the source files of other projects' ports: the sample that nobody tuned to."""
