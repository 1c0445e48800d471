"""What our engine does piece by piece: the loss, the exchange of tokens, the update of offloaded states."""

from __future__ import annotations

from typing import Any

from shardwise.collectives.arrays import maximum, minimum

LOGITS_AT_ONCE = 2**28  # most logits that the loss has in memory: half a GiB in 16 bits
EVEN_TOKENS = 128  # pieces are multiples of this, for matmuls of whole tiles
WIDE_LOGITS = 2**22  # logits that are in fp32 at a time where a CPU computes their gradients: 16 MiB; none on a GPU

EXCHANGED_CHUNKS = 2  # chunks of a microbatch's tokens, where exchanges of one overlap with experts of another

# A GPU updates states in host memory chunk by chunk: one arrives, one is updated, one leaves. What the forward pass
# needs first has arrived before the update begins.
MOVING_SLOTS = 3
UPDATE_CHUNK_ELEMENTS = 2**23  # 32 MiB of every state: the latency of a copy is negligible
FEWEST_CHUNKS, LEAST_ELEMENTS = 32, 2**14


def loss_in_one_piece(tokens: float, hidden: int) -> bool:
    """Whether the loss computes the logits of all tokens at once, in 16 bits, instead of piece by piece.

    That is faster, and takes at most twice the memory of the fp32 gradient that is summed over pieces.
    """
    return tokens <= 4 * hidden


def loss_tokens_at_once(tokens: float, vocabulary: float, hidden: int) -> int:
    """Tokens whose logits the loss has in memory at a time; ``vocabulary``: the whole, or a rank's part of it."""
    if loss_in_one_piece(tokens, hidden):
        return max(1, int(tokens))
    some = max(1, int(LOGITS_AT_ONCE // vocabulary))
    return some - some % EVEN_TOKENS if some > EVEN_TOKENS else some


def padded_vocabulary(vocabulary: int) -> int:
    """Columns of the logits on a GPU, whose matmuls are fast where a row is a multiple of 16 bytes."""
    return vocabulary if vocabulary % 8 == 0 else -(-vocabulary // 64) * 64


def update_chunk(elements: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Elements of offloaded states that are updated at a time."""
    return minimum(most, maximum(LEAST_ELEMENTS, elements // FEWEST_CHUNKS))


def update_slots(elements: Any, first: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Chunks that the device has room for, if a forward pass needs the ``first`` elements to run its first layer."""
    return MOVING_SLOTS - (-first // update_chunk(elements, most))
