"""How a network is split under Accelerate: by its FSDP plugin, by transformers at loading, by FSDP1 around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.integrations.layout import FSDP, MESH
from shardwise.integrations.module import NotPriced, language_model

SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
_WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


# -- the plugin of FSDP ------------------------------------------------------------------------------------------------


def fsdp_settings(plugin: Any, module: nn.Module | None = None) -> dict[str, Any]:
    """Accelerate's FSDP plugin, of either version; of FSDP1 the ``module`` as it is wrapped says what it does."""
    offload, recomputes = plugin.cpu_offload, bool(plugin.activation_checkpointing)
    settings: dict[str, Any] = {
        FSDP + "version": int(plugin.fsdp_version),
        # FSDP1 has a class whose field says it, FSDP2 a policy whose class does.
        FSDP + "offload_params": bool(getattr(offload, "offload_params", type(offload).__name__ == "CPUOffloadPolicy")),
        FSDP + "activation_checkpointing": recomputes,
    }
    if recomputes:
        offloaded = bool(getattr(plugin, "activation_checkpointing_offload", False))
        settings[FSDP + "activation_checkpointing_offload"] = offloaded
    if plugin.fsdp_version == 1:
        # A network that its user has wrapped stays as it is (`Accelerator.prepare_model`), whatever the plugin says.
        wrapped = getattr(_first_fsdp(module), "sharding_strategy", None)
        chosen = wrapped or plugin.sharding_strategy or plugin.reshard_after_forward
        settings[FSDP + "sharding_strategy"] = (getattr(chosen, "name", None) or str(chosen)).lstrip("_")
    else:
        settings[FSDP + "reshard_after_forward"] = bool(plugin.reshard_after_forward)
    return settings


def fsdp_precision(plugin: Any, mixed: str, module: nn.Module | None = None) -> tuple[str, dict[str, Any]]:
    """What FSDP gathers and computes in, as ``mixed_precision`` of a file, and how the stack differs: it reduces in
    the format that the policy has, which is the same unless its user gave another (`set_mixed_precision`)."""
    own = getattr(_first_fsdp(module), "mixed_precision", None)
    policy = own or plugin.mixed_precision_policy
    if policy is None:
        return mixed, {}
    computed = _WORDS.get(policy.param_dtype, "no")
    if mixed not in ("no", "fp8", computed):
        problem = f"mixed_precision {mixed!r} beside an FSDP policy whose param_dtype is {policy.param_dtype}"
        raise NotPriced("precision", f"{problem} is not priced", "give both the same format")
    narrow = policy.reduce_dtype in _WORDS or (policy.reduce_dtype is None and policy.param_dtype in _WORDS)
    return mixed if mixed == "fp8" else computed, {"gradient_reduce": "bf16"} if narrow else {}


def _first_fsdp(module: nn.Module | None) -> nn.Module | None:
    """The outermost module that FSDP1 is around; None where there is none."""
    inside = () if module is None else module.modules()
    return next((part for part in inside if type(part).__name__ == "FullyShardedDataParallel"), None)


# -- tensor parallelism, and what transformers splits itself -----------------------------------------------------------


@dataclass(frozen=True)
class LoadedSplit:
    """What `from_pretrained(distributed_config=...)` has split: over ``tp`` ranks, and those over ``fsdp`` ones."""

    tp: int
    fsdp: int
    offload: bool
    mixed: bool  # gathers bf16 weights, reduces fp32 gradients

    def settings(self, mixed: str, processes: int) -> dict[str, Any]:
        """As Accelerate's file says it: transformers calls `fully_shard` itself, on a mesh of its own."""
        if self.tp * self.fsdp != processes:
            problem = f"{processes:,} processes, but the network is split over {self.tp} · {self.fsdp}"
            raise NotPriced("model", problem, "split it over all processes: tp_size · fsdp_size")
        if self.fsdp > 1 and mixed != "no" and not self.mixed:
            problem = f"{mixed} by autocast beside gathered fp32 weights is not priced"
            raise NotPriced("precision", problem, "DistributedConfig(fsdp_mixed_precision=True)")
        return {
            "distributed_type": "FSDP", "mixed_precision": "bf16" if self.mixed else mixed, FSDP + "version": 2,
            FSDP + "reshard_after_forward": True, FSDP + "offload_params": self.offload,
            MESH + "dp_replicate_size": 1, MESH + "dp_shard_size": self.fsdp, MESH + "tp_size": self.tp,
            MESH + "cp_size": 1,
        }  # fmt: skip


def loaded_split(module: nn.Module | None) -> LoadedSplit | None:
    """What transformers has split when it loaded the network; None where it has not."""
    network: Any = None if module is None else language_model(module)
    if not getattr(network, "is_distributed_loading_by_transformers", False):
        return None
    config = getattr(network.config, "distributed_config", None)
    others = {name: getattr(config, name, 1) or 1 for name in ("pp_size", "ep_size")}
    for name, size in others.items():
        if size > 1:
            raise NotPriced(
                "model", f"{name} {size} of DistributedConfig is not read", "split by tp_size and fsdp_size"
            )
    return LoadedSplit(
        int(getattr(network, "tp_size", None) or 1),
        int(getattr(network, "fsdp_size", None) or 1),
        bool(getattr(config, "fsdp_cpu_offload", False)),
        bool(getattr(config, "fsdp_mixed_precision", False)),
    )


def require_split(module: nn.Module, ranks: int, dimension: str, remedy: str) -> None:
    """A mesh splits no weights: a framework passes a whole network on, and every rank computes all of it."""
    if ranks > 1 and not any(_is_split(parameter, ranks, dimension) for parameter in module.parameters()):
        problem = f"the mesh has {ranks} tensor-parallel ranks, but no weight of the network is split over them"
        raise NotPriced("model", problem, remedy)


def _is_split(parameter: nn.Parameter, ranks: int, dimension: str) -> bool:
    data: Any = parameter
    if not isinstance(data, DTensor):
        return False
    names = data.device_mesh.mesh_dim_names or ()
    return any(
        name == dimension and size == ranks and placement.is_shard()
        for name, size, placement in zip(names, data.device_mesh.shape, data.placements, strict=False)
    )
