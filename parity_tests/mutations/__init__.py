"""Mistakes planted in the source, and the checks that must catch them: `make mutations`."""
