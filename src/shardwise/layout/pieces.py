"""What our engine does piece by piece: the loss, a matmul beside its ring, exchanges, updates of states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.collectives.arrays import maximum, minimum
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

LOGITS_AT_ONCE = 2**28  # most logits that the loss has in memory: half a GiB in 16 bits
EVEN_TOKENS = 128  # pieces are multiples of this, for matmuls of whole tiles
WIDE_LOGITS = 2**22  # logits that are in fp32 at a time where a CPU computes their gradients: 16 MiB; none on a GPU

MLP_AT_ONCE = 2**28  # most activations that an MLP makes at once where its layer is recomputed: half a GiB in 16 bits

EXCHANGED_CHUNKS = 2  # chunks of a microbatch's tokens, where exchanges of one overlap with experts of another

# A GPU updates states in host memory chunk by chunk: one arrives, one is updated, one leaves. What the forward pass
# needs first has arrived before the update begins.
MOVING_SLOTS = 3
UPDATE_CHUNK_ELEMENTS = 2**23  # 32 MiB of every state: the latency of a copy is negligible
FEWEST_CHUNKS, LEAST_ELEMENTS = 32, 2**14


def loss_in_one_piece(tokens: float, hidden: int, *, trains_head: bool) -> bool:
    """Whether the loss computes the logits of all tokens at once, in 16 bits, instead of piece by piece.

    That is faster, and takes at most twice the memory of the fp32 gradient that is summed over pieces. A frozen head
    has no such gradient: its pieces cost nothing.
    """
    return trains_head and tokens <= 4 * hidden


def loss_tokens_at_once(tokens: float, vocabulary: float, hidden: int, *, trains_head: bool) -> int:
    """Tokens whose logits the loss has in memory at a time; ``vocabulary``: the whole, or a rank's part of it."""
    if loss_in_one_piece(tokens, hidden, trains_head=trains_head):
        return max(1, int(tokens))
    some = max(1, int(LOGITS_AT_ONCE // vocabulary))
    return some - some % EVEN_TOKENS if some > EVEN_TOKENS else some


def mlp_tokens_at_once(tokens: int, width: int) -> int:
    """Tokens for which an MLP of this ``width`` is computed, and computed again, at a time (`computes_mlp_in_pieces`).

    No token's MLP reads another's (Liu and Abbeel 2023, Blockwise Parallel Transformer, arXiv 2305.19370).
    """
    if tokens * width <= MLP_AT_ONCE:
        return max(1, tokens)
    return max(EVEN_TOKENS, MLP_AT_ONCE // width // EVEN_TOKENS * EVEN_TOKENS)


def computes_mlp_in_pieces(job: Job) -> bool:
    """Whether our engine computes the MLPs of dense layers in pieces, if they have more tokens than one piece.

    Only where the layer is computed again anyway. A piece has no scale of its own in FP8, a compiled layer no pieces.
    """
    training, strategy = job.training, job.strategy
    dropped = training.adapters is not None and training.adapters.dropout > 0  # by keys of all tokens
    whole = strategy.recompute == "full" and strategy.tp == 1 and job.stack.is_own
    return whole and not (training.compile or dropped or training.recipe.compute == "fp8")


def padded_vocabulary(vocabulary: int) -> int:
    """Columns of the logits on a GPU, whose matmuls are fast where a row is a multiple of 16 bytes."""
    return vocabulary if vocabulary % 8 == 0 else -(-vocabulary // 64) * 64


def update_chunk(elements: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Elements of offloaded states that are updated at a time."""
    return minimum(most, maximum(LEAST_ELEMENTS, elements // FEWEST_CHUNKS))


def update_slots(elements: Any, first: Any, most: int = UPDATE_CHUNK_ELEMENTS) -> Any:
    """Chunks that the device has room for, if a forward pass needs the ``first`` elements to run its first layer."""
    return MOVING_SLOTS - (-first // update_chunk(elements, most))


# -- Parameter servers: which weights each server keeps, and the bytes that cross its link


@dataclass(frozen=True)
class ServerPlan:
    """Weights in as many contiguous parts as there are servers."""

    workers: int
    servers: int
    elements: int  # all weights
    gradient_bytes: float = 4  # of one element
    weight_bytes: float = 4  # of one element

    def __post_init__(self) -> None:
        for name in ("workers", "servers", "elements"):
            if getattr(self, name) < 1:
                raise SpecError(name, f"{getattr(self, name)} is too few", "use 1 or more")
        if self.servers > self.elements:
            raise SpecError("servers", f"{self.servers:,} for {self.elements:,} weights", "use fewer")

    def part(self, server: int) -> range:
        """The weights that a server keeps; sizes differ by one at most."""
        return range(self.elements * server // self.servers, self.elements * (server + 1) // self.servers)

    @property
    def largest_part(self) -> int:
        return max(len(self.part(server)) for server in range(self.servers))

    def received_bytes(self, server: int, steps: int) -> float:
        """Gradients of every worker in every step."""
        return self.workers * steps * len(self.part(server)) * self.gradient_bytes

    def sent_bytes(self, server: int, steps: int) -> float:
        """Weights to every worker, before the first step and after each."""
        return self.workers * (steps + 1) * len(self.part(server)) * self.weight_bytes

    @property
    def push_bytes(self) -> float:
        """Over the busiest link while all workers push: a server's, or a worker's where there are more servers."""
        return max(self.workers * self.largest_part, self.elements) * self.gradient_bytes

    @property
    def pull_bytes(self) -> float:
        return max(self.workers * self.largest_part, self.elements) * self.weight_bytes


# -- A matmul cut into one part per rank, which overlaps the ring that brings its input or takes its result
# Wang et al. 2023 (ASPLOS, doi 10.1145/3567955.3567959): while a part is multiplied, the next one is on its way. The
# price and the engine use the same order.


def gathered_parts(rank: int, ranks: int) -> tuple[int, ...]:
    """The parts of an all-gather in the order in which they reach a rank: its own first, then those of ranks before."""
    return tuple((rank - step) % ranks for step in range(ranks))


def scattered_parts(rank: int, ranks: int) -> tuple[int, ...]:
    """The parts of a reduce-scatter in the order in which a rank adds to them: its own last, which is then complete."""
    return tuple((rank - 1 - step) % ranks for step in range(ranks))


def share_beside_products(ranks: int) -> float:
    """The share of the parts that are sent while another is multiplied: all but one."""
    return 1 - 1 / ranks
