"""Context parallelism: each rank holds a part of every sequence, and attention works across the parts.

Three ways, each a replacement of a module's ``attend``: `ring`, `gather` (of keys and values) and `ulysses`
(heads for tokens). `sequence` says which tokens a rank holds.
"""

from shardwise.engine.context.apply import apply_context
from shardwise.engine.context.sequence import check_sequence, cut_sequence, join_sequence

__all__ = ["apply_context", "check_sequence", "cut_sequence", "join_sequence"]
