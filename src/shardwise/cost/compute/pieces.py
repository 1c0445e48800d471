"""How our engine cuts the loss into pieces: the logits of all tokens would be the largest tensor of a step."""

from __future__ import annotations

LOGITS_AT_ONCE = 2**28  # that the loss has in memory: half a GiB in 16 bits
EVEN_TOKENS = 128  # a product of whole tiles


def loss_tokens_at_once(vocabulary: float) -> int:
    """The tokens whose logits the loss has in memory, of a whole vocabulary or of a rank's part of it."""
    tokens = max(1, int(LOGITS_AT_ONCE // vocabulary))
    return tokens - tokens % EVEN_TOKENS if tokens > EVEN_TOKENS else tokens
