"""What our engine does piece by piece: the loss, the exchange of tokens, the update of offloaded states."""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum, minimum

LOGITS_AT_ONCE = 2**28  # that the loss has in memory: half a GiB in 16 bits
EVEN_TOKENS = 128  # a product of whole tiles
WIDE_LOGITS = 2**22  # of those, in fp32 at a time where a CPU computes their gradients: 16 MiB; a GPU has none

EXCHANGED_CHUNKS = 2  # of a microbatch's tokens, where exchanges overlap chunk by chunk

# States in host memory that a GPU updates are on it a chunk at a time: one arrives, one is updated, one leaves. Those
# that the forward pass needs first have come before the update begins.
MOVING_SLOTS = 3
UPDATE_CHUNK_ELEMENTS = 2**23  # 32 MiB of every state, so that the latency of a copy does not count
FEWEST_CHUNKS, LEAST_ELEMENTS = 32, 2**14


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


def padded_vocabulary(vocabulary: int) -> int:
    """The columns of the logits on a GPU, whose products are fast where rows have whole 16 bytes."""
    return vocabulary if vocabulary % 8 == 0 else -(-vocabulary // 64) * 64


def update_chunk(elements: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Elements that are updated at a time."""
    return minimum(most, maximum(LEAST_ELEMENTS, elements // FEWEST_CHUNKS))


def update_slots(elements: Any, first: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Chunks on the device, if a forward pass needs the ``first`` elements before its first layer can run."""
    return MOVING_SLOTS - (-first // update_chunk(elements, most))
