"""The flags that describe a job, shared by the verbs."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwise.api.campaign import FLAGS as CAMPAIGN_FLAGS
from shardwise.api.given import NAMED, JobArguments
from shardwise.spec.errors import SpecError, shown

# Flags that set one field of the job: flag, path of the field, help.
_FIELD_FLAGS = (
    ("--dp", "strategy.dp", "data parallel degree (default: the devices that are left)"),
    ("--tp", "strategy.tp", "tensor parallel degree"),
    ("--pp", "strategy.pp", "pipeline stages"),
    ("--cp", "strategy.cp", "context parallel degree"),
    ("--ep", "strategy.ep", "expert parallel degree"),
    ("--expert-tp", "strategy.expert_tp", "ranks that split one expert (default: tp)"),
    ("--zero", "strategy.zero", "ZeRO stage: 0, 1, 2 or 3"),
    ("--shard-group", "strategy.shard_group", "ranks ZeRO shards over (hybrid sharding)"),
    ("--order", "strategy.order", "rank order, innermost first: tp,cp,dp,pp"),
    ("--microbatch", "strategy.microbatch", "sequences per microbatch, or auto: the largest that fits"),
    ("--schedule", "strategy.schedule", "pipeline schedule: 1f1b, interleaved, zbv, ... (`shardwise list schedules`)"),
    ("--interleave", "strategy.interleave", "model chunks per pipeline rank"),
    ("--stage-layers", "strategy.stage_layers", "even, balanced, or layers per stage: 7,8,8,7"),
    ("--recompute", "strategy.recompute", "none, selective or full"),
    ("--context-method", "strategy.context_method", "ring, all-gather or ulysses"),
    ("--dispatch", "strategy.dispatch", "all-to-all or deduplicated"),
    ("--stack", "stack", "software that runs it: shardwise, megatron-core, torchtitan, ... or a file"),
    ("--collective", "strategy.collective", "auto, textbook, or one algorithm"),
    ("--global-batch", "training.global_batch", "sequences per step, or tokens: 16M-tokens"),
    ("--batch", "training.global_batch", "the same as --global-batch"),
    ("--seq", "training.seq", "tokens per sequence"),
    (
        "--precision",
        "training.precision",
        "fp32, fp16, bf16, bf16-fp32-grads, fp8, fp8-delayed, fp8-rowwise, fp8-blockwise, mxfp8, nvfp4, int8",
    ),
    ("--optimizer", "training.optimizer", "adamw, sgd, sgd-momentum, adamw-bf16-moments, adam8bit, muon"),
    ("--attention", "training.attention", "flash or unfused"),
    ("--memory-risk", "run.memory_risk", "accepted probability of running out of device memory (default 5%%)"),
)
# Flags that set one field to a fixed value: flag, path of the field, value, help.
_SWITCHES = (
    ("--no-sp", "strategy.sequence_parallel", False, "tensor parallelism without sequence parallelism"),
    ("--dropout", "training.dropout", True, "dropout masks are kept for the backward pass"),
)
_LISTS = ("strategy.order", "strategy.stage_layers")


def add_job_arguments(parser: argparse.ArgumentParser, first: str = "job file (YAML); flags override it") -> None:
    """A job file (``first`` is its help), and flags that override it."""
    parser.add_argument("job", nargs="?", help=first)
    what = parser.add_argument_group("the job")
    what.add_argument("--model", help="preset, model file, or a Hugging Face folder or its config.json")
    what.add_argument("--cluster", help="preset or file, sized: dgx-h100:64, tpu-v5p:8x8x16")
    what.add_argument("--gpus", help="number of devices")
    what.add_argument("--gpus-per-node", help="devices of a node in use")
    what = parser.add_argument_group("strategy and training")
    for flag, path, help_text in _FIELD_FLAGS:
        what.add_argument(flag, dest=path, metavar="X", help=help_text)
    for flag, path, value, help_text in _SWITCHES:
        what.add_argument(flag, dest=path, action="store_const", const=value, help=help_text)
    what.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field of the job, such as strategy.overlap.tp=true",
    )
    bare = parser.add_argument_group("bare numbers in place of presets")
    bare.add_argument("--params", help="parameters, such as 70e9 or 70B")
    for flag in ("--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab"):
        bare.add_argument(flag, metavar="N")
    bare.add_argument("--topology", help="ring, tree, hierarchical, switch, mesh, torus, line, fully-connected")
    bare.add_argument("--shape", help="axes of a mesh or torus: 8x8, 4x4x8")
    bare.add_argument("--bandwidth", help="one direction, per level innermost first: 450GB/s,50GB/s")
    bare.add_argument("--latency", help="per message, per level innermost first: 2us,5us")
    bare.add_argument("--device", help="device preset or file (default h100-sxm)")


def field_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of strategy and training set by flags, as path → value."""
    from shardwise.spec.files import parse_yaml

    paths = (path for _, path, *_ in (*_FIELD_FLAGS, *_SWITCHES))
    overrides = {path: value for path in paths if (value := getattr(arguments, path)) is not None}
    for path in _LISTS:
        if "," in overrides.get(path, ""):
            overrides[path] = [item.strip() for item in overrides[path].split(",")]
    for setting in arguments.set:
        path, equals, text = setting.partition("=")
        if not equals or not path.strip():
            raise SpecError("--set", f"{shown(setting)} is not FIELD=VALUE", "write it like strategy.overlap.tp=true")
        overrides[path.strip()] = parse_yaml(text, f"--set {path.strip()}")
    return overrides


def job_arguments(arguments: argparse.Namespace) -> JobArguments:
    """The job that the flags describe."""
    return replace(bare_numbers(arguments), overrides=field_overrides(arguments))


def bare_numbers(arguments: argparse.Namespace) -> JobArguments:
    """The job without fields of strategy and training."""
    return JobArguments(**{name: value for name, value in vars(arguments).items() if name in ("job", *NAMED)})


def add_campaign_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for days, money and failures."""
    group = parser.add_argument_group("the whole run")
    for flag, example, help_text in CAMPAIGN_FLAGS:
        group.add_argument(flag, metavar=example, help=help_text)


def keywords(verb: Callable[..., Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags that are keywords of a function of the API; those that were not given keep its defaults."""
    taken = (
        parameter.name
        for parameter in inspect.signature(verb).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    )
    return {name: value for name in taken if (value := getattr(arguments, name, None)) is not None}
