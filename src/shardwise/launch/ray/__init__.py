"""Ranks on a Ray cluster: a placement group for the gang, an agent in each of its bundles."""
