"""How our engine cuts the loss into pieces: the logits of many tokens would be the largest tensor of a step."""

from __future__ import annotations

LOGITS_AT_ONCE = 2**28  # that the loss has in memory: half a GiB in 16 bits
EVEN_TOKENS = 128  # a product of whole tiles


def loss_in_one_piece(tokens: float, hidden: int) -> bool:
    """Whether the loss has the logits of all tokens at once, in 16 bits, instead of a sum over pieces in fp32.

    That is faster; it takes at most twice the memory of the sum.
    """
    return tokens <= 4 * hidden


def loss_tokens_at_once(tokens: float, vocabulary: float, hidden: int) -> int:
    """The tokens whose logits the loss has in memory, of a whole vocabulary or of a rank's part of it."""
    if loss_in_one_piece(tokens, hidden):
        return max(1, int(tokens))
    some = max(1, int(LOGITS_AT_ONCE // vocabulary))
    return some - some % EVEN_TOKENS if some > EVEN_TOKENS else some
