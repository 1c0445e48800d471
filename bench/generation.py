"""What the key-value cache is worth: tokens a second with and without it, in turns, on one process.

    PYTHONPATH=src python bench/generation.py [--new 128]

Exits 1 where the cache is not worth what it should be, or where the tokens differ.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace

import torch

from shardwise.generation.decoding import NextToken, generated_tokens
from shardwise.generation.request import GenerationRequest
from shardwise.models import Decoder, initialise
from shardwise.spec.model import Model

MODEL = Model(
    layers=4, hidden=256, heads=8, kv_heads=2, ffn=704, vocab=1024, activation="swiglu", norm="rmsnorm",
    norm_bias=False,
)  # fmt: skip
PROMPT, BATCH, ROUNDS = 64, 2, 3
LEAST_RATIO = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new", type=int, default=128, help="new tokens of each prompt (default 128)")
    new = parser.parse_args().new
    decoder = Decoder(MODEL).eval()
    initialise(decoder, 0, MODEL)
    model, request = NextToken(decoder), GenerationRequest("", max_new_tokens=new)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, MODEL.vocab, (BATCH, PROMPT), generator=generator).tolist()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    tokens: dict[bool, list[dict[int, int]]] = {}
    for _ in range(ROUNDS):
        for cache in (True, False):
            began = time.perf_counter()
            tokens[cache] = list(generated_tokens(model, prompts, replace(request, cache=cache)))
            seconds[cache].append(time.perf_counter() - began)
    rates = {cache: BATCH * new / statistics.median(one) for cache, one in seconds.items()}
    ratio = rates[True] / rates[False]
    print(
        f"{BATCH} prompts of {PROMPT}, {new} new tokens each: {rates[True]:.0f} tokens/s with the cache, "
        f"{rates[False]:.0f} without: {ratio:.1f} times"
    )
    if tokens[True] != tokens[False]:
        print("the tokens differ")
        return 1
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
