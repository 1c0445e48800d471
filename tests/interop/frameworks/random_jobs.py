"""Random jobs: any valid one, and for each framework those it is known to be able to say.

The second kind is written down here from what the frameworks document, not from our tables: a job drawn for a
framework has to survive the way there and back without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from random import Random
from typing import Any

from shardwise.spec import Cluster, Job, SpecError
from shardwise.spec.schedules import job_schedules
from shardwise.spec.training import OPTIMIZERS, RECIPES

SCHEDULES = job_schedules()

DENSE = ("llama3-8b", "llama3-70b", "gpt3-13b", "qwen2.5-7b", "gemma2-9b", "mistral-7b")
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3", "deepseek-v2-lite")
ORDERS = (["tp", "cp", "dp", "pp"], ["tp", "cp", "pp", "dp"], ["dp", "tp", "cp", "pp"], ["cp", "tp", "dp", "pp"])
# Its softmax scores weight the experts as they are, and nothing balances them (nanotron/nn/moe.py).
UNNORMALISED_MIXTRAL = {
    "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000, "max_seq": 32768,
    "name": "unnormalised-mixtral", "activation": "swiglu", "norm": "rmsnorm",
    "moe": {"experts": 8, "top_k": 2, "ffn": 14336},
    "numerics": {"rope_theta": 1e6, "renormalise_top_k": False, "balance_loss": 0},
}  # fmt: skip
Fields = dict[str, Any]


@cache
def drawn(framework: str | None, seed: int, number: int) -> tuple[Job, ...]:
    """``number`` random jobs, valid as jobs; of those that ``framework`` can say, where one is named."""
    return tuple(_drawn(framework, Random(seed), number))


def _drawn(framework: str | None, random: Random, number: int) -> Iterator[Job]:
    while number:
        try:
            fields = _BY_FRAMEWORK[framework](random) if framework else _anything(random)
            job = _job(random, {**fields, "framework": framework})
        except SpecError:
            continue
        number -= 1
        yield job


def _job(random: Random, fields: Fields) -> Job:
    """A job with its own cluster of just the devices that the degrees need, and a batch that divides."""
    strategy, training = fields["strategy"], fields["training"]
    devices = 1
    for name in ("tp", "cp", "dp", "pp"):
        devices *= strategy.setdefault(name, 1)
    rounds = random.choice((1, 2, 3)) * strategy["pp"]
    training["global_batch"] = strategy["dp"] * strategy.setdefault("microbatch", random.choice((1, 2, 4))) * rounds
    level = {"size": devices, "link": "nvswitch-h100"}
    cluster = Cluster.from_dict({"device": "h100-sxm", "levels": [level]})
    optimization, schedule = _VALUES.get(fields.get("framework"), _any_values)(random)
    warmup = 0 if training.get("tokens") else random.choice((0, 2, 100))
    run = {"steps": random.choice((1000, 333)), "schedule": {"warmup": warmup, **schedule}}
    training["optimization"] = optimization
    job = {"model": fields["model"], "cluster": cluster, "strategy": strategy, "training": training, "run": run}
    return Job.from_dict(job)


def _any_values(random: Random) -> tuple[Fields, Fields]:
    """Constants of the optimizer and of the schedule."""
    pick = random.choice
    scaling = {"initial": pick((2.0**12, 2.0**16)), "window": pick((500, 1000)), "hysteresis": pick((1, 2)),
               "minimum": pick((1.0, 2.0)), "static": pick((None, 1024.0))}  # fmt: skip
    optimization = {
        "learning_rate": pick((3e-4, 1e-3, 2.7e-5)), "decay": pick((0.0, 0.1, 0.033)), "beta1": pick((0.9, 0.8)),
        "beta2": pick((0.95, 0.999)), "epsilon": pick((1e-8, 1e-6)), "momentum": pick((0.9, 0.95)),
        "clip_norm": pick((None, 1.0, 0.5)), "loss_scaling": scaling,
    }  # fmt: skip
    schedule = {
        "kind": pick(("constant", "cosine", "linear", "wsd")),
        "final": pick((0.0, 0.1, 0.3)),
        "decay": pick((0.1, 0.25)),
    }
    return optimization, schedule


def _titan_values(random: Random) -> tuple[Fields, Fields]:
    optimization, schedule = _any_values(random)
    return {**optimization, "clip_norm": random.choice((1.0, 0.5))}, schedule  # it always clips


def _colossal_values(random: Random) -> tuple[Fields, Fields]:
    optimization, schedule = _any_values(random)
    optimization["loss_scaling"]["static"] = None  # its scale is always found by trial
    return optimization, schedule


def _nano_values(random: Random) -> tuple[Fields, Fields]:
    optimization, schedule = _any_values(random)
    return {**optimization, "loss_scaling": {}}, schedule  # which has no options


_VALUES: dict[Any, Callable[[Random], tuple[Fields, Fields]]] = {
    "torchtitan": _titan_values,
    "colossalai": _colossal_values,
    "nanotron": _nano_values,
}


def _anything(random: Random) -> Fields:
    pick = random.choice
    share = lambda: pick((0, 0, 0, 0.5, 1))  # noqa: E731
    strategy: Fields = {
        "tp": pick((1, 2, 4, 8)), "cp": pick((1, 1, 2, 4)), "dp": pick((1, 2, 4, 8)), "pp": pick((1, 1, 2, 4)),
        "ep": pick((1, 1, 2, 4, 8)), "expert_tp": pick((None, None, 1, 2)), "zero": pick((0, 1, 2, 3)),
        "shard_group": pick((None, None, 2, 4)), "keep_parameters": pick((True, False)),
        "accumulate": pick(("sharded", "local")), "sequence_parallel": pick((True, False)), "order": pick(ORDERS),
        "schedule": pick(SCHEDULES), "stage_layers": pick(("even", "balanced")), "recompute_layers": pick((None, 1, 3)),
        "recompute": pick(("none", "selective", "full")), "context_method": pick(("ring", "all-gather", "ulysses")),
        "recompute_operators": pick((["attention"], ["norm"], ["attention", "activation", "norm"])),
        "dispatch": pick(("all-to-all", "deduplicated")), "collective": pick(("auto", "auto", "ring")),
        "overlap": {name: pick((True, False)) for name in ("dp", "tp", "pp", "cp", "ep", "offload")},
        "offload": {name: share() for name in ("optimizer", "gradients", "weights", "activations")},
    }  # fmt: skip
    strategy["offload"]["target"] = pick(("cpu", "nvme"))
    if strategy["schedule"] == "interleaved":
        strategy["interleave"] = pick((2, 4))
    training = {
        "seq": pick((2048, 4096, 8192)), "precision": pick(sorted(RECIPES)), "optimizer": pick(sorted(OPTIMIZERS)),
        "attention": pick(("flash", "unfused")), "dropout": pick((True, False)), "tokens": pick((None, 10**9)),
        "checkpoint_interval": pick((None, 600)),
    }  # fmt: skip
    return {"model": pick((*DENSE, *EXPERTS, "bert-large")), "strategy": strategy, "training": training}


def _deepspeed(random: Random) -> Fields:
    pick = random.choice
    pp, expert = pick((1, 1, 2, 4)), pick((True, False))
    zero = pick((0, 1)) if pp > 1 else pick((0, 1, 2, 3))
    ep = pick((1, 2, 4)) if expert else 1
    recompute = pick(("none", "full"))
    moved = pick((0, 1)) if zero in (1, 2) else pick((0, 0.5, 1)) if zero == 3 else 0
    strategy = {
        "tp": pick((1, 2, 4)), "cp": pick((1, 1, 2)), "dp": pick((1, 2, 4)), "pp": pick((1, 2, 4)) if pp > 1 else 1,
        "zero": zero, "sequence_parallel": False, "context_method": "ulysses", "ep": ep, "recompute": recompute,
        "expert_tp": pick((1, 2)) if ep > 1 else None, "dispatch": pick(("all-to-all", "deduplicated")),
        "stage_layers": pick(("even", "balanced")),
        "overlap": {"dp": pick((True, False)) if zero else False, "tp": pick((True, False)), "cp": False},
        "offload": {"optimizer": moved, "gradients": moved, "weights": pick((0, 1)) if zero == 3 else 0,
                    "activations": pick((0, 1)) if recompute == "full" else 0},
    }  # fmt: skip
    if moved or strategy["offload"]["weights"]:
        strategy["offload"]["target"] = pick(("cpu", "nvme"))
    training = {
        "precision": pick(("fp32", "fp16", "bf16", "bf16-fp32-grads")), "seq": pick((2048, 4096)),
        "optimizer": pick(("adamw", "sgd", "sgd-momentum", "muon")),
    }  # fmt: skip
    return {"model": pick(EXPERTS if expert else DENSE), "strategy": strategy, "training": training}


def _megatron(random: Random) -> Fields:
    pick = random.choice
    pp, expert, optimizer = pick((1, 2, 4)), pick((True, False)), pick(("adamw", "sgd", "sgd-momentum", "muon"))
    zero = pick((0, 1)) if optimizer == "muon" or pp > 1 else pick((0, 1, 2, 3))
    interleaved, method = pick((True, False)) and pp > 1, pick(("ring", "all-gather", "ulysses"))
    recompute, sequence = pick(("none", "selective", "full")), pick((True, False))
    strategy: Fields = {
        "tp": pick((1, 2, 4)), "cp": pick((1, 2, 4)), "dp": pick((1, 2, 4)), "pp": pp, "zero": zero,
        "ep": pick((1, 2, 4)) if expert else 1, "expert_tp": pick((None, 1, 2)) if expert else None,
        "shard_group": pick((None, 2)) if zero and optimizer != "muon" else None, "order": pick(ORDERS[:2]),
        "sequence_parallel": sequence, "context_method": method, "dispatch": pick(("all-to-all", "deduplicated")),
        "schedule": "interleaved" if interleaved else "1f1b", "interleave": pick((2, 4)) if interleaved else 1,
        "stage_layers": pick(("even", "balanced")), "recompute": recompute,
        "recompute_layers": pick((None, 1, 3)) if recompute == "full" else None,
        "overlap": {"dp": pick((True, False)), "tp": sequence and pick((True, False)), "cp": method == "ring",
                    "pp": interleaved and pick((True, False)), "ep": pick((True, False)),
                    "offload": pick((True, False))},
        "offload": {"optimizer": pick((0, 0, 0.25, 1))},
    }  # fmt: skip
    if strategy["ep"] > 1 and strategy["tp"] > 1:
        strategy["sequence_parallel"] = True
    if strategy["offload"]["optimizer"] == 0 and pp == 1 and recompute == "none":
        strategy["overlap"]["offload"] = True
        strategy["offload"]["activations"] = pick((0, 0.5))
    seq = pick((2048, 4096, 8192))
    training = {
        "seq": seq, "optimizer": optimizer, "attention": pick(("flash", "unfused")), "dropout": pick((True, False)),
        "precision": pick(sorted(set(RECIPES) - {"int8", "fp8-rowwise"} - ({"fp16"} if strategy["ep"] > 1 else set()))),
        "tokens": pick((None, seq * 1000)),
    }  # fmt: skip
    latent, plain = ("deepseek-v3", "deepseek-v2-lite"), ("mixtral-8x7b", "qwen3-30b-a3b")
    model = pick((*latent, *plain))
    if expert and model in latent:
        strategy["offload"]["activations"] = 0  # their layers are an odd number
    if strategy["overlap"]["ep"] and (recompute == "full" or (pp > 1 and not interleaved)):
        strategy["overlap"]["ep"] = False  # refused
    if recompute == "selective" and training["attention"] == "flash":
        # Norms that Transformer Engine fuses into a product, and the activation of a dense MLP, are always kept.
        operators = ["norm", "up-projection"] if model in latent else ["activation"]
        strategy["recompute_operators"] = operators
        strategy["recompute"] = "selective" if expert else "none"
    dense = ("llama3-8b", "llama2-70b", "qwen2.5-7b", "mistral-7b", "qwen3-8b", "yi-34b")
    dense += ("gpt3-13b",) * (seq == 2048)  # learned positions end there
    return {"model": model if expert else pick(dense), "strategy": strategy, "training": training}


def _torchtitan(random: Random) -> Fields:
    pick = random.choice
    dp, cp, expert = pick((2, 4, 8)), pick((1, 2)), pick((True, False))
    ep, tp = pick((1, 2, 4)) if expert else 1, pick((1, 2, 4))
    schedule = pick(("1f1b", "gpipe", "interleaved", "zbv", "dualpipev"))
    pp = pick((1, 2, 4))
    alone = tp == cp == pp == 1 and pick((True, False))  # plain replication
    moved = pick((0, 0, 1))
    strategy: Fields = {
        "tp": tp, "cp": cp, "dp": dp, "pp": pp, "zero": 0 if alone else 3, "schedule": schedule, "ep": ep,
        "interleave": pick((2, 4)) if schedule == "interleaved" else 1, "stage_layers": pick(("even", "balanced")),
        "expert_tp": pick((1, tp)) if ep > 1 else None, "dispatch": pick(("all-to-all", "deduplicated")),
        "shard_group": None if alone else pick((None, max(2, dp * cp // 2))), "keep_parameters": pick((True, False)),
        "context_method": pick(("ring", "all-gather")), "recompute_operators": ["alternate-products"],
        "recompute": pick(("none", "full") if expert else ("none", "selective", "full")),
        "overlap": {"tp": pick((True, False)), "ep": schedule == "dualpipev" and pp > 1 and pick((True, False))},
        "offload": {"optimizer": moved, "gradients": moved, "weights": moved},
    }  # fmt: skip
    if pp > 1 and schedule in ("zbv", "dualpipev"):
        strategy["keep_parameters"] = True
    if pp > 1 and not moved:  # its stages reduce after the last backward pass
        strategy["accumulate"] = "local"
    training = {
        "seq": pick((2048, 8192)),
        "precision": pick(("fp32", "bf16-fp32-grads", "fp8", "fp8-rowwise", "mxfp8")),
    }
    dense = ("llama3.1-8b", "llama3.1-70b", "qwen3-8b", "qwen3-32b")
    return {"model": pick(EXPERTS[1:] if expert else dense), "strategy": strategy, "training": training}


def _accelerate(random: Random) -> Fields:
    pick = random.choice
    mode = pick(("replicas", "fsdp", "deepspeed"))
    dp, recompute, moved = pick((2, 4, 8)), pick(("none", "full")), pick((0, 1))
    strategy: Fields = {"dp": dp, "sequence_parallel": False}
    training: Fields = {"seq": pick((2048, 8192)), "precision": pick(("fp32", "fp16", "bf16-fp32-grads", "fp8"))}
    if mode == "fsdp":
        strategy |= {
            "zero": 3, "tp": pick((1, 2)), "cp": pick((1, 2)), "context_method": pick(("ring", "all-gather")),
            "keep_parameters": pick((True, False)), "shard_group": pick((None, "half")), "recompute": recompute,
            "offload": {"optimizer": moved, "gradients": moved, "weights": moved,
                        "activations": pick((0, 1)) if recompute == "full" else 0},
        }  # fmt: skip
        if strategy["shard_group"]:
            strategy["shard_group"] = dp * strategy["cp"] // 2
    if mode == "deepspeed":
        zero = pick((1, 2, 3))
        strategy |= {
            "zero": zero, "cp": pick((1, 2)), "context_method": "ulysses", "overlap": {"dp": zero == 3, "cp": False},
            "offload": {"optimizer": moved, "gradients": moved, "weights": 1 - moved if zero == 3 else 0},
        }  # fmt: skip
        if moved or zero == 3:
            strategy["offload"]["target"] = pick(("cpu", "nvme"))
        if zero == 3 and strategy["cp"] == 1:
            strategy["offload"]["target"] = "nvme"  # else FSDP fits
        training["precision"] = pick(("fp32", "fp16", "bf16", "fp8"))
    return {"model": pick(DENSE), "strategy": strategy, "training": training}


def _nanotron(random: Random) -> Fields:
    pick = random.choice
    expert, seq = pick((True, False)), pick((2048, 8192))
    strategy = {
        "tp": pick((1, 2, 4)), "cp": pick((1, 2)), "dp": pick((1, 2, 4)), "pp": pick((1, 2, 4)), "zero": pick((0, 1)),
        "ep": pick((1, 2, 4)) if expert else 1, "order": ORDERS[1] if expert else ORDERS[0],
        "schedule": pick(("1f1b", "gpipe")), "sequence_parallel": pick((True, False)),
        "recompute": pick(("none", "full")), "overlap": {"tp": pick((True, False))},
    }  # fmt: skip
    training = {
        "seq": seq, "precision": pick(("fp32", "fp16", "bf16", "bf16-fp32-grads")), "optimizer": pick(("adamw", "sgd")),
    }  # fmt: skip
    sizes = {"llama3-8b": (32, 4096, 14336, 128256), "llama2-13b": (40, 5120, 13824, 32000)}
    dense = pick(("llama3-8b", "llama2-13b"))
    model: Any = UNNORMALISED_MIXTRAL if expert else dense
    if strategy["pp"] > 1:
        strategy["stage_layers"] = _by_cost(strategy["pp"], *((32, 4096, 14336, 32000) if expert else sizes[dense]))
    return {"model": model, "strategy": strategy, "training": training}


def _by_cost(stages: int, layers: int, hidden: int, ffn: int, vocab: int) -> list[int]:
    """Layers per stage by nanotron's costs: a stage is full with the layer that passes its share of all products."""
    layer, head = 4 * hidden**2 + 3 * hidden * ffn, hidden * vocab
    ends = [next(n for n in range(layers + 1) if n * layer > (i + 1) * (layers * layer + head) / stages)
            for i in range(stages - 1)]  # fmt: skip
    return [end - begin for begin, end in zip([0, *ends], [*ends, layers])]


def _colossalai(random: Random) -> Fields:
    pick = random.choice
    pp, tp, cp, expert = pick((1, 2, 4)), pick((1, 2, 4)), pick((1, 1, 2)), pick((True, False))
    method, schedule = pick(("ring", "ulysses")), pick(("1f1b", "interleaved", "zbv"))
    ep = pick((2, 4)) if expert else 1
    zero = pick((0, 1)) if pp > 1 or expert else pick((0, 1, 2))
    inner = ["tp", "cp"] if method == "ring" else ["cp", "tp"]
    strategy = {
        "tp": tp, "cp": cp, "dp": pick((4, 8)), "pp": pp, "zero": zero, "ep": ep,
        "sequence_parallel": cp == 1 and pick((True, False)), "context_method": method, "schedule": schedule,
        "interleave": pick((2, 4)) if schedule == "interleaved" else 1, "recompute": pick(("none", "full")),
        "order": [*inner, *pick((["dp", "pp"], ["pp", "dp"]))],
        "overlap": {"dp": not expert and pick((True, False)), "pp": schedule != "1f1b" and pick((True, False)),
                    "cp": method == "ring"},
        "offload": {"optimizer": pick((0, 1)) if zero else 0},
    }  # fmt: skip
    training = {"seq": pick((2048, 8192)), "precision": pick(("fp32", "fp16", "bf16", "fp8"))}
    if cp == 1 or method == "ulysses":
        training["attention"] = pick(("flash", "unfused"))
    return {"model": pick(EXPERTS if expert else DENSE), "strategy": strategy, "training": training}


_BY_FRAMEWORK: dict[str, Callable[[Random], Fields]] = {
    "deepspeed": _deepspeed,
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "accelerate": _accelerate,
    "nanotron": _nanotron,
    "colossalai": _colossalai,
}
