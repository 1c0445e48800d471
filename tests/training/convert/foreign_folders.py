"""Folders as DeepSpeed and Megatron-LM write them, made of known weights; with objects of classes that are not here."""

from __future__ import annotations

import argparse
import io
import math
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed.checkpoint as checkpoint
from torch import Tensor

from shardwise.spec.model import Model


@contextmanager
def foreign_object(module: str = "megatron.core.enums", name: str = "ModelType") -> Iterator[Any]:
    """An object whose class can be pickled now and is nowhere when the file is read."""
    kind = type(name, (), {"__module__": module})
    with _importable(kind):
        one = kind()
        one.loss_scale = 65536.0
        yield one


@contextmanager
def _importable(kind: type) -> Iterator[None]:
    """While this lasts, the class can be pickled as one of its module."""
    parts = kind.__module__.split(".")
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    made = {one: ModuleType(one) for one in names}
    with mock.patch.dict(sys.modules, {one: module for one, module in made.items() if one not in sys.modules}):
        setattr(sys.modules[kind.__module__], kind.__name__, kind)
        yield


# -- DeepSpeed --------------------------------------------------------------------------------------------


# As DeepSpeed 0.19 saves the stage (``runtime/zero/config.py``).
_ZeroStage = IntEnum("ZeroStageEnum", {f"stage_{n}": n for n in range(4)}, module="deepspeed.runtime.zero.config")


def _with_attributes(parts: list[Tensor]) -> list[Tensor]:
    """ZeRO-3 leaves its own attributes on tensors, which `torch.save` then writes as it writes a subclass."""
    for number, part in enumerate(parts):
        part.ds_id = number  # type: ignore[attr-defined]
    return parts


def write_deepspeed(
    folder: Path, tensors: Mapping[str, Tensor], stage: int, ranks: int, shared: Mapping[str, str] | None = None
) -> Path:
    """Two groups of parameters, as weight decay makes them; the last tensor is frozen."""
    step = folder / "global_step7"
    step.mkdir(parents=True)
    (folder / "latest").write_text("global_step7")
    *names, frozen = tensors
    groups = [
        {name: tensors[name] for name in names if tensors[name].dim() > 1},
        {name: tensors[name] for name in names if tensors[name].dim() <= 1},
    ]
    partitions = _stage_3(groups, ranks) if stage == 3 else _stage_2(groups, ranks)
    for rank in range(ranks):
        whole = tensors[frozen]
        state = {
            "module": {} if stage == 3 else {name: one.bfloat16() for name, one in tensors.items()},
            "buffer_names": [],
            "param_shapes": [OrderedDict((name, one.shape) for name, one in group.items()) for group in groups],
            "frozen_param_shapes": {frozen: whole.shape},
            "frozen_param_fragments": {frozen: _padded(whole, ranks).chunk(ranks)[rank] if stage == 3 else whole},
            "shared_params": dict(shared or {}),
            "global_steps": 7,
            "dp_world_size": ranks,
            "mp_world_size": 1,
            "ds_version": "0.17.1",
            "args": argparse.Namespace(local_rank=rank),
        }
        if stage == 3:
            torch.save(state, step / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(state, step / "mp_rank_00_model_states.pt")
        key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
        with foreign_object("deepspeed.runtime.fp16.loss_scaler", "LossScaler") as scaler, _importable(_ZeroStage):
            optimizer = {
                "zero_stage": _ZeroStage(stage),
                "partition_count": ranks if stage == 3 else [ranks] * len(groups),
                "loss_scaler": scaler,
                key: _with_attributes(partitions[rank]),
                "base_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(3)}}},
            }
            states = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.17.1"}
            torch.save(states, step / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    flat = tensor.flatten().float()
    return torch.cat((flat, torch.full((-flat.numel() % multiple,), math.nan)))


def _stage_2(groups: list[dict[str, Tensor]], ranks: int) -> list[list[Tensor]]:
    """Of every rank its part of each group; the padding at the end is not saved."""
    parts: list[list[Tensor]] = [[] for _ in range(ranks)]
    for group in groups:
        flat = torch.cat([one.flatten().float() for one in group.values()])
        each = _padded(flat, 2 * ranks).numel() // ranks
        for rank in range(ranks):
            parts[rank].append(flat[rank * each : (rank + 1) * each].clone())
    return parts


def _stage_3(groups: list[dict[str, Tensor]], ranks: int) -> list[list[Tensor]]:
    """Of every rank its part of each parameter, end to end in sub-groups that are cut between parameters."""
    everything = [one for group in groups for one in group.values()]
    parts = []
    for rank in range(ranks):
        mine = [_padded(one, ranks).chunk(ranks)[rank] for one in everything]
        parts.append([torch.cat(mine[:5]), torch.cat(mine[5:])])
    return parts


# -- Megatron-LM ------------------------------------------------------------------------------------------


def write_megatron(
    folder: Path, model: Model, tensors: Mapping[str, Tensor], *, tp: int, pp: int, chunks: int = 1, fused: bool = True
) -> Path:
    """As mcore's GPTModel is saved with --ckpt-format torch; ``fused``: norms under Transformer Engine's names."""
    (folder / "iter_0000012").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    each = model.layers // (pp * chunks)
    for t in range(tp):
        for p in range(pp):
            suffix = f"_{p:03d}" if pp > 1 else ""
            path = folder / "iter_0000012" / f"mp_rank_{t:02d}{suffix}" / "model_optim_rng.pt"
            path.parent.mkdir()
            models = {}
            for chunk in range(chunks):
                stage = chunk * pp + p
                layers = range(stage * each, (stage + 1) * each)
                last = stage == pp * chunks - 1
                held = _stage_tensors(model, tensors, layers, t, tp, first=stage == 0, last=last, fused=fused)
                models[f"model{chunk}" if chunks > 1 else "model"] = held
            with foreign_object() as kind:
                state = {"args": _arguments(model, tp, pp, kind), "checkpoint_version": 3.0, "iteration": 12, **models}
                torch.save({**state, "rng_state": [{"random_rng_state": (3, (1, 2), None)}]}, path)
    return folder


def write_megatron_distributed(folder: Path, model: Model, tensors: Mapping[str, Tensor]) -> Path:
    """As mcore's GPTModel is saved with --ckpt-format torch_dist: whole tensors, those of all layers stacked."""
    iteration = folder / "iter_0000012"
    iteration.mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("12")
    held = _stage_tensors(model, tensors, range(model.layers), 0, 1, first=True, last=True, fused=True)
    inner = dict.fromkeys(name.split(".", 3)[3] for name in held if name.startswith("decoder.layers."))
    stored: dict[str, Any] = {name: one for name, one in held.items() if not name.startswith("decoder.layers.")}
    for name in inner:
        parts = [held[f"decoder.layers.{number}.{name}"] for number in range(model.layers)]
        whole = name.endswith("_extra_state")
        stored[f"decoder.layers.{name}"] = io.BytesIO(b"notes") if whole else torch.stack(parts)
        stored[f"optimizer.state.exp_avg.decoder.layers.{name}"] = torch.zeros(3)
    checkpoint.save(stored, checkpoint_id=iteration, no_dist=True)
    with foreign_object() as kind:
        state = {"args": _arguments(model, 2, 2, kind), "checkpoint_version": 3.0, "iteration": 12}
        torch.save(state, iteration / "common.pt")
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return folder


def _arguments(model: Model, tp: int, pp: int, kind: Any) -> argparse.Namespace:
    return argparse.Namespace(
        num_layers=model.layers, hidden_size=model.hidden, num_attention_heads=model.heads, model_type=kind,
        ffn_hidden_size=model.ffn, group_query_attention=model.key_value_heads != model.heads,
        num_query_groups=model.key_value_heads, kv_channels=model.head_size, swiglu=model.activation == "swiglu",
        normalization="RMSNorm" if model.norm == "rmsnorm" else "LayerNorm", norm_epsilon=model.numerics.norm_epsilon,
        vocab_size=model.vocab, padded_vocab_size=model.vocab + 3, max_position_embeddings=model.max_seq,
        position_embedding_type="rope" if model.positions == "rope" else "learned_absolute", rotary_percent=1.0,
        rotary_base=10000, untie_embeddings_and_output_weights=not model.tied_embeddings, num_experts=None,
        add_bias_linear=model.mlp_bias, add_qkv_bias=False, bias_gelu_fusion=True, qk_layernorm=model.qk_norm,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, params_dtype=torch.bfloat16,
        multi_latent_attention=False, window_size=None,
    )  # fmt: skip


def _stage_tensors(
    model: Model, tensors: Mapping[str, Tensor], layers: range, t: int, tp: int, *, first: bool, last: bool, fused: bool
) -> dict[str, Any]:
    held: dict[str, Any] = OrderedDict()
    padding = torch.zeros(-model.vocab % (tp * 4), model.hidden)
    if first:
        held["embedding.word_embeddings.weight"] = torch.cat((tensors["embedding.weight"], padding)).chunk(tp)[t]
        if "position_embedding.weight" in tensors:
            held["embedding.position_embeddings.weight"] = tensors["position_embedding.weight"]
    for local, index in enumerate(layers):
        before = f"layers.{index}."
        layer = {name.removeprefix(before): one for name, one in tensors.items() if name.startswith(before)}
        for name, one in _layer_tensors(model, layer, t, tp, fused).items():
            held[f"decoder.layers.{local}.{name}"] = one.clone()
        held[f"decoder.layers.{local}.self_attention.linear_qkv._extra_state"] = None
    if last:
        for kind in ("weight", "bias"):
            if f"norm.{kind}" in tensors:
                held[f"decoder.final_layernorm.{kind}"] = tensors[f"norm.{kind}"]
        if not model.tied_embeddings:
            held["output_layer.weight"] = torch.cat((tensors["head.weight"], padding)).chunk(tp)[t]
    return held


def _layer_tensors(model: Model, layer: Mapping[str, Tensor], t: int, tp: int, fused: bool) -> dict[str, Tensor]:
    held: dict[str, Tensor] = {}
    queries = model.heads // model.key_value_heads
    for kind in ("weight", "bias"):
        if f"attention.query.{kind}" in layer:
            parts = []
            per_group = [queries * model.head_size, model.head_size, model.head_size]
            split = [
                layer[f"attention.{name}.{kind}"].split(size)
                for name, size in zip(("query", "key", "value"), per_group)
            ]
            for group in range(model.key_value_heads):
                parts += [one[group] for one in split]
            held[f"self_attention.linear_qkv.{kind}"] = torch.cat(parts).chunk(tp)[t]
        if f"mlp.up.{kind}" in layer:
            names = ["mlp.gate", "mlp.up"] if model.gated else ["mlp.up"]
            held[f"mlp.linear_fc1.{kind}"] = torch.cat([layer[f"{name}.{kind}"].chunk(tp)[t] for name in names])
        for ours, alone, into in (
            ("attention_norm", "input_layernorm", "self_attention.linear_qkv"),
            ("mlp_norm", "pre_mlp_layernorm", "mlp.linear_fc1"),
        ):
            if f"{ours}.{kind}" in layer:
                name = f"{into}.layer_norm_{kind}" if fused else f"{alone}.{kind}"
                held[name] = layer[f"{ours}.{kind}"]
    for ours, theirs in (("attention.output", "self_attention.linear_proj"), ("mlp.down", "mlp.linear_fc2")):
        held[f"{theirs}.weight"] = layer[f"{ours}.weight"].chunk(tp, dim=1)[t]
        if f"{ours}.bias" in layer:
            held[f"{theirs}.bias"] = layer[f"{ours}.bias"]
    return held
