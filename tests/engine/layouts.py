"""Every technique as a value of some factor, and layouts that cover all pairs of values with few runs."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from math import prod
from pathlib import Path
from typing import Any

from shardwise.measure.reference import cluster_of
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.presets import resolve
from shardwise.spec.strategy import Overlap, Strategy
from shardwise.spec.support import Verdict, verdict
from shardwise.spec.training import Optimization, Training

HERE = Path(__file__).parent
MOST_RANKS = 8
SEQ = 32
CLIP = 0.2  # every step is clipped

# Factor → value → fields of the strategy. The first value of a factor is "does not use it".
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "data": {
        "one": {"dp": 1},
        "only-zero-1": {"dp": 1, "zero": 1},  # over the context-parallel ranks, where there are any
        "only-zero-2": {"dp": 1, "zero": 2},
        "only-zero-3": {"dp": 1, "zero": 3},
        "zero-0": {"dp": 2},
        "zero-1": {"dp": 2, "zero": 1},
        "zero-2": {"dp": 2, "zero": 2},
        "zero-2-local": {"dp": 2, "zero": 2, "accumulate": "local"},
        "zero-3": {"dp": 2, "zero": 3},
        "zero-3-local": {"dp": 2, "zero": 3, "accumulate": "local"},
        "zero-3-kept": {"dp": 2, "zero": 3, "keep_parameters": True},
        "hybrid-1": {"dp": 4, "zero": 1, "shard_group": 2},
        "hybrid-2": {"dp": 4, "zero": 2, "shard_group": 2},
        "hybrid-3": {"dp": 4, "zero": 3, "shard_group": 2},
    },
    "tensor": {
        "one": {},
        "sp": {"tp": 2},
        "plain": {"tp": 2, "sequence_parallel": False},
        "overlapped": {"tp": 2, "overlap": {"tp": True}},
    },
    "context": {
        "one": {},
        "ring": {"cp": 2, "context_method": "ring"},
        "all-gather": {"cp": 2, "context_method": "all-gather"},
        "ulysses": {"cp": 2, "context_method": "ulysses"},
    },
    "pipeline": {
        "one": {},
        **{name: {"pp": 2, "schedule": name} for name in ("gpipe", "1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")},
        "interleaved": {"pp": 2, "schedule": "interleaved", "interleave": 2},
        **{name: {"pp": 2, "schedule": name} for name in ("zbv", "v-half", "v-min", "dualpipev")},
        "own-stages": {"pp": 2, "schedule": "1f1b", "stage_layers": (1, 3)},
    },
    "experts": {
        "one": {},
        "ep": {"ep": 2, "expert_tp": 1},
        "ep-deduplicated": {"ep": 2, "expert_tp": 1, "dispatch": "deduplicated"},
        "ep-expert-tp": {"ep": 2},
        "ep-overlapped": {"ep": 2, "expert_tp": 1, "overlap": {"ep": True}},
        "ep-expert-tp-overlapped": {"ep": 2, "overlap": {"ep": True}},
    },
    "recompute": {
        "none": {},
        "selective": {"recompute": "selective"},
        "full": {"recompute": "full"},
        "one-layer": {"recompute": "full", "recompute_layers": 1},
    },
    "order": {
        "usual": {},
        "pipeline-inside": {"order": ("pp", "tp", "cp", "dp")},
        "data-inside": {"order": ("dp", "tp", "cp", "pp")},
    },
    "batch": {"one": {"microbatch": 1}, "two-sequences": {"microbatch": 2}},
}  # fmt: skip
MODELS = ("tiny", "tiny-moe", "tiny-mla", "tied-gpt")
NAMES = (*FACTORS, "model")
Pair = tuple[tuple[str, str], tuple[str, str]]


@cache
def model_named(name: str) -> Model:
    if name != "tied-gpt":
        model = resolve("model", Model, name)
        # Balancing that is seen in every gradient and moves tokens to other experts within three steps.
        return replace(model, numerics=replace(model.numerics, balance_loss=0.05, bias_rate=0.02))
    return Model(layers=4, hidden=32, heads=4, ffn=64, vocab=51, positions="learned", tied_embeddings=True,
                 qkv_bias=True, attention_out_bias=True, mlp_bias=True, max_seq=64, name="tied-gpt")  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A value for every factor, and a model."""

    values: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, model: str = "tiny", **values: str) -> Layout:
        chosen = {name: next(iter(choices)) for name, choices in FACTORS.items()} | values | {"model": model}
        return cls(tuple((name, chosen[name]) for name in NAMES))

    def __str__(self) -> str:
        neutral = {name: next(iter(choices)) for name, choices in FACTORS.items()}
        return "-".join(value for name, value in self.values if neutral.get(name) != value)

    @property
    def pairs(self) -> frozenset[Pair]:
        return frozenset(combinations(self.values, 2))

    @property
    def fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in self.values:
            chosen = FACTORS[name][value] if name in FACTORS else {}
            overlap = {**fields.get("overlap", {}), **chosen.get("overlap", {})}
            fields |= {**chosen, **({"overlap": overlap} if overlap else {})}
        return fields

    @property
    def ranks(self) -> int:
        fields = self.fields
        return prod(fields.get(name, 1) for name in ("tp", "cp", "dp", "pp"))

    def job(self) -> Job | None:
        """The job, or None where the layout is none: too large, or experts asked of a model that has none."""
        model = model_named(dict(self.values)["model"])
        if self.ranks > MOST_RANKS or (model.moe is None and dict(self.values)["experts"] != "one"):
            return None
        return job_of(model, self.fields)


def job_of(model: Model, fields: Mapping[str, Any], microbatches: int | None = None) -> Job | None:
    """Four layers and microbatches let every schedule have its chunks; without stages, a first, a middle, a last."""
    if "pp" not in fields:
        model = replace(model, layers=3, published_parameters=None)
    microbatches = microbatches or (4 if "pp" in fields else 3)
    try:
        strategy = Strategy(**{**fields, "overlap": Overlap(**fields.get("overlap", {}))})
        batch = strategy.data_parallel * strategy.microbatch * microbatches
        return Job(
            model=model,
            cluster=cluster_of(cluster_from("laptop"), strategy.world),
            strategy=strategy,
            training=Training(global_batch=batch, seq=SEQ, precision="fp32", optimization=Optimization(clip_norm=CLIP)),
        )
    except SpecError:
        return None


def judged(layout: Layout) -> Verdict | None:
    job = layout.job()
    return None if job is None else verdict(job)


def every_pair() -> Iterator[Layout]:
    """For every two values of different factors one layout with just these."""
    for first, second in combinations(NAMES, 2):
        for one, other in product(_choices(first), _choices(second)):
            yield Layout.of(
                **{"model": "tiny-moe" if "experts" in (first, second) else "tiny", first: one, second: other}
            )


def _choices(name: str) -> tuple[str, ...]:
    return MODELS if name == "model" else tuple(FACTORS[name])


# What the quick tests take of each factor: one value of every kind.
COARSE = {
    "data": ("one", "zero-0", "zero-1", "zero-3", "hybrid-2"),
    "tensor": ("one", "sp", "plain"),
    "context": ("one", "ring", "ulysses"),
    "pipeline": ("one", "1f1b", "interleaved", "zbv"),
    "experts": ("one", "ep", "ep-expert-tp"),
    "recompute": ("none", "selective", "full"),
    "order": ("usual", "data-inside"),
    "batch": ("one", "two-sequences"),
    "model": MODELS,
}
ALL = {name: _choices(name) for name in NAMES}
Choices = Mapping[str, tuple[str, ...]]
FILES = {"quick": COARSE, "all": ALL}


def covering(name: str) -> list[Layout]:
    """The layouts of a covering array that was made before: ``quick`` or ``all``."""
    lines = (HERE / f"covering_{name}.txt").read_text(encoding="utf-8").splitlines()
    return [Layout(tuple(zip(NAMES, line.split()))) for line in lines]


def missing_pairs(layouts: Iterable[Layout], choices: Choices) -> set[Pair]:
    """Pairs of values that run in some layout and are in none of these."""
    running = {pair for layout in _candidates(random.Random(0), choices, 6000) for pair in layout.pairs}
    return running - {pair for layout in layouts for pair in layout.pairs}


def completed(layouts: Iterable[Layout], choices: Choices) -> list[Layout]:
    """Those of the layouts that still run, and a few more: together they have every pair of values that runs at all.

    Greedy, and the same every time; what was run before stays.
    """
    drawn = random.Random(0)
    chosen = [one for one in layouts if runnable(one)]
    missing = missing_pairs(chosen, choices)
    while missing:
        wanted = min(missing)
        several = [next(_with(drawn, choices, wanted)) for _ in range(60)]
        best = max(several, key=lambda layout: (len(layout.pairs & missing), -layout.ranks))
        chosen.append(best)
        missing -= best.pairs
    return chosen


def runnable(layout: Layout) -> bool:
    found = judged(layout)
    return found is not None and found.status == "runs"


def _candidates(drawn: random.Random, choices: Choices, number: int) -> Iterator[Layout]:
    for _ in range(number):
        layout = Layout(tuple((name, drawn.choice(choices[name])) for name in NAMES))
        if runnable(layout):
            yield layout


def _with(drawn: random.Random, choices: Choices, pair: Pair) -> Iterator[Layout]:
    wanted = dict(pair)
    while True:
        layout = Layout(tuple((name, wanted.get(name) or drawn.choice(choices[name])) for name in NAMES))
        if runnable(layout):
            yield layout


if __name__ == "__main__":
    for name, choices in FILES.items():
        lines = [" ".join(value for _, value in layout.values) for layout in completed(covering(name), choices)]
        (HERE / f"covering_{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(name, len(lines))
