"""Parallel training of a module: one file per technique, each applied from outside."""
