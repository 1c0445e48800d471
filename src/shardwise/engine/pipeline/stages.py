"""What is left of a decoder on the rank that holds one stage of it."""

from __future__ import annotations

from shardwise.models import Decoder


def keep_stage(decoder: Decoder, layers: range, *, first: bool, last: bool) -> Decoder:
    """Takes away what belongs to other stages; works without values too (on the meta device)."""
    for index in list(decoder.layers):
        if int(index) not in layers:
            del decoder.layers[index]
    if not first:
        decoder.embedding = decoder.position_embedding = None
    if not last:
        decoder.norm = decoder.head = None
    return decoder
