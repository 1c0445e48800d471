"""Context parallelism: each rank holds a part of every sequence, and attention works across the parts.

Three methods, each a replacement of a module's ``attend``: `ring`, `gather` (of keys and values) and `ulysses`
(heads for tokens; in `apply`). `sequence` defines which tokens a rank holds.
"""
