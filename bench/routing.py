"""How unevenly a mixture routes before it has learned anything: tokens of the fullest expert, as a share of all.

python bench/routing.py                      # 8, 16 and 64 experts
python bench/routing.py --hidden 1024 8      # wider, 8 experts

A decoder with random weights (standard deviation 0.02, residual outputs less by the square root of twice its layers)
reads the words of the documentation; nothing balances the load. Layer by layer the tokens become more alike, until all
of them choose the same experts.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

LAYERS, TOKENS, TOP_K, WORDS = 24, 1024, 2, 20_000
DEVIATION = 0.02
DOCUMENTS = Path(__file__).parents[1] / "docs"


def token_ids() -> Tensor:
    """The words of the documents, the most frequent first."""
    text = " ".join(page.read_text(encoding="utf-8") for page in sorted(DOCUMENTS.glob("*.md")))
    words = re.findall(r"\w+|[^\w\s]|\s", text)
    numbers = {word: number for number, (word, _) in enumerate(Counter(words).most_common(WORDS))}
    return torch.tensor([numbers.get(word, 0) for word in words[5_000 : 5_000 + TOKENS]])


def random_weight(*shape: int, residual: bool = False) -> Tensor:
    return torch.randn(*shape) * DEVIATION / ((2 * LAYERS) ** 0.5 if residual else 1)


def normed(stream: Tensor) -> Tensor:
    return functional.rms_norm(stream, (stream.shape[-1],), eps=1e-5)


def attention(stream: Tensor, head: int = 128) -> Tensor:
    tokens, hidden = stream.shape
    query, key, value = (
        (stream @ random_weight(hidden, hidden)).view(tokens, -1, head).transpose(0, 1) for _ in range(3)
    )
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return mixed.transpose(0, 1).reshape(tokens, hidden) @ random_weight(hidden, hidden, residual=True)


def mixture(stream: Tensor, experts: int) -> tuple[Tensor, float]:
    """What the experts make of the stream, and the share of its tokens that the fullest one has."""
    tokens, hidden = stream.shape
    weights, chosen = torch.topk(torch.softmax(stream @ random_weight(hidden, experts), -1), TOP_K)
    weights = weights / weights.sum(-1, keepdim=True)
    output = torch.zeros_like(stream)
    for expert in range(experts):
        rows, choice = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (stream[rows] @ random_weight(hidden, 7 * hidden // 2) for _ in range(2))
        made = (functional.silu(gate) * up) @ random_weight(7 * hidden // 2, hidden, residual=True)
        output[rows] += weights[rows, choice, None] * made
    return output, float(torch.bincount(chosen.flatten()).max()) / tokens


@torch.no_grad()
def fullest_shares(experts: int, hidden: int) -> list[float]:
    torch.manual_seed(0)
    stream, shares = random_weight(WORDS, hidden)[token_ids()], []
    for _ in range(LAYERS):
        stream = stream + attention(normed(stream))
        output, share = mixture(normed(stream), experts)
        stream = stream + output
        shares.append(share)
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experts", type=int, nargs="*", default=[8, 16, 64])
    parser.add_argument("--hidden", type=int, default=512)
    given = parser.parse_args()
    for experts in given.experts:
        shares = fullest_shares(experts, given.hidden)
        layers = " ".join(f"{share:.0%}" for share in shares)
        print(f"{experts} experts, balanced {TOP_K / experts:.0%}: {layers}; most {max(shares):.0%}")


if __name__ == "__main__":
    main()
