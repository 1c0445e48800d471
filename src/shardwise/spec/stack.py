"""The software stack that runs a job, as flags and kinds; never as fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.spec import presets
from shardwise.spec.codec import Spec, count
from shardwise.spec.schedules import ScheduleRecord, StepEnds
from shardwise.spec.strategy import Overlap, Strategy
from shardwise.spec.training import Recipe

OWN = "shardwise"
_CHANGED = "-changed"


@dataclass(frozen=True, kw_only=True)
class Stack(Spec):
    """What a training framework does by itself: kernels it fuses, what it overlaps, in which format it reduces.

    ``overlap`` is what a job on this stack overlaps unless its strategy says otherwise. ``tp_overlap`` says how:
    "decomposed" cuts the matmul into pieces (async TP), "buffers" sends tiles as they are made (user buffers).
    ``ep_overlap``: exchanges of tokens overlap with the computation of other "microbatches", which some schedules run
    beside them, or with that of other "chunks" of the same tokens.
    ``tp_gradients`` says whether the collectives of a split matmul's backward pass run "beside" the one of its two
    matmuls that does not need them. ``scattered_messages``: tensor-parallel ranks that hold the same activations send
    a part each to the next stage, which gathers the parts. ``per_parameter_shards``: ZeRO-1 cuts every parameter by
    itself and gathers after the optimizer's step; the host launches a copy for each parameter and rank.
    ``per_parameter_gathers``: ZeRO-3 gathers and reduces every parameter by itself. ``pipeline_gradients``: under a
    pipeline ZeRO keeps "whole" gradients and reduces them once a step; or does so up to ZeRO-2, as Megatron-LM's
    distributed optimizer, and ZeRO-3 alone reduces them after every microbatch ("sharded by zero-3"); or both ZeRO-2
    and 3 do ("sharded", see `usual_accumulation`). ``step_ends``: the norm of all
    gradients makes pipeline ranks end a step "together", unless a framework updates before it knows the norm and
    repairs the update afterwards ("apart": post-validation, Qi et al. 2023, arXiv 2401.10241, section 4).

    ``full_recompute`` repeats a "whole" layer, or "as needed" only what the backward pass reads, which its last matmul
    is not.

    What it keeps in memory: ``loss`` is a cross entropy split over the vocabulary ("parallel"), the same in compiled
    "steps" that write new tensors, the same on an fp32 copy of the logits ("copied"), the plain one on such a copy
    ("plain"), that one "compiled", so that it reads the 16-bit logits, one that turns the 16-bit logits into their
    gradient in place ("fused"), or one that makes the logits of a few tokens at a time and keeps none ("pieces").
    ``gated_activation``: a gate that is a kernel of its own keeps its output. ``norms`` made of "separate" kernels, RMS
    norms as transformers writes them, keep an fp32 input and what comes out before the weight. ``autocast``: whole fp32
    weights compute in 16 bits under `torch.autocast`, without ZeRO (see `Job.autocasts`). ``key_value_cache``: the
    model returns keys and values with its loss. ``expert_outputs`` are "kept" where they
    are weighted after they have come back to their tokens. ``fp8_experts``: routed experts too are multiplied in FP8
    or FP4 where other linear layers are. ``saved_activations`` in "8-bit" are those of an FP8 recipe that also keeps
    the inputs of gated activations in FP8 and one output of attention, in 12 bits, for its own backward pass and the
    projection's, as DeepSeek-V3 does (arXiv 2412.19437, section 3.3.3). ``gathered_inputs``, of layers that sequence
    parallelism gathers for, are kept in 16 bit or as the recipe has other inputs. ``latents``, the narrow vectors of
    latent attention, are kept "whole" by tensor-parallel ranks, or "cut" and gathered again as Megatron-LM does.
    ``gradients`` have memory from the start ("kept") or are made in the backward pass, so that those of a single
    microbatch never meet all its activations ("made"), where those of the last step may stay until the loss
    ("replaced"). ``dummy_gradients``: an empty 16-bit gradient of every weight
    shape stays allocated. ``late_gradients``: 16-bit gradients are added to fp32 ones after a whole backward pass.
    ``deferred_head_gradients``: microbatches whose gradient of the head waits for the end of the pipeline.
    ``sharded_parameters`` in "fp32" are the master weights too; in "fp32 shards" they are so beside whole 16-bit ones
    that are gathered from them for every step, as FSDP does for every stage of ZeRO, which gathers embedding and head
    once for both passes and sums copies of shards after the last microbatch. ``masters`` of whole bf16 weights are fp32
    numbers, or the "rest": their lower halves, of which the weights are the upper ones; or numbers of
    "16-bit", as a copy that is updated; with "none" the optimizer
    updates the 16-bit weights themselves, by gradients of their format. ``update_elements``: the optimizer's update
    copies gradients, into one tensor and then into the format of the masters, under ZeRO-3 so many elements at a time
    (see `update_copies`); 0: it reads them where they are. ``message_buffers`` of a pipeline: one for each
    direction, or for each microbatch too, with all outputs of the stage beside them.
    ``allocator`` and ``layer_launches`` (kernels of a layer's forward pass, where tensors of collectives wait for the
    device) say what PyTorch reserves beyond its tensors. ``parallel_blocks``: attention and MLP that stand side by side
    share the moves of tensor parallelism ("joined"), or not ("apart"). ``layers``: who wrote them. Transformer Engine
    has a workspace of its own and keeps a copy of FlashAttention's output by sequences; Megatron's own ("local") keep a
    buffer of scores. ``experts`` of a device are one grouped matmul, which has workspaces, or run in turn.
    ``deterministic``: cuBLAS has larger workspaces.
    """

    name: str = "custom"
    attention: Literal["unfused", "flash-1", "flash-2", "fused"] = "fused"
    overlap: Overlap = field(default_factory=Overlap)
    tp_overlap: Literal["decomposed", "buffers"] = "decomposed"
    tp_gradients: Literal["beside", "in turn"] = "beside"
    ep_overlap: Literal["microbatches", "chunks"] = "microbatches"
    scattered_messages: bool = False
    step_ends: StepEnds = "together"
    full_recompute: Literal["whole", "as needed"] = "whole"
    gradient_reduce: Literal["fp32", "bf16"] = "fp32"
    parameter_gather: Literal["bf16", "fp8"] = "bf16"
    dispatch: Literal["all-to-all", "deduplicated"] = "all-to-all"
    fp8_dispatch: bool = False
    fp8_experts: bool = True
    cuda_graphs: Literal["none", "partial", "full", "step"] = "none"
    elementwise: Literal["fused", "compiled", "eager"] = "fused"
    fused_moe_mlp: bool = False
    fused_permute: bool = False
    routing: Literal["dropless", "capacity", "on device"] = "dropless"
    loss: Literal["parallel", "steps", "copied", "plain", "compiled", "fused", "pieces"] = "parallel"
    gated_activation: Literal["fused", "separate"] = "fused"
    norms: Literal["fused", "separate"] = "fused"
    autocast: bool = False
    key_value_cache: bool = False
    casts: Literal["fused", "transposed", "separate"] = "transposed"
    dummy_gradients: bool = False
    late_gradients: bool = False
    sharded_parameters: Literal["16-bit", "fp32", "fp32 shards"] = "16-bit"
    masters: Literal["fp32", "rest", "16-bit", "none"] = "fp32"
    update_elements: int = count(0, minimum=0, maximum=10**18)
    gradients: Literal["kept", "made", "replaced"] = "kept"
    expert_outputs: Literal["weighted", "kept"] = "weighted"
    saved_activations: Literal["16-bit", "8-bit"] = "16-bit"
    gathered_inputs: Literal["16-bit", "recipe"] = "recipe"
    latents: Literal["cut", "whole"] = "cut"
    parallel_blocks: Literal["joined", "apart"] = "joined"
    allocator: Literal["segments", "expandable"] = "segments"
    layer_launches: int = 0
    per_parameter_shards: bool = False
    per_parameter_gathers: bool = False
    pipeline_gradients: Literal["whole", "sharded by zero-3", "sharded"] = "sharded by zero-3"
    layers: Literal["torch", "megatron", "transformer engine"] = "torch"
    experts: Literal["grouped", "in turn"] = "grouped"
    deterministic: bool = False
    deferred_head_gradients: int = 0
    message_buffers: Literal["one", "per microbatch"] = "one"
    source: str = ""

    @property
    def is_own(self) -> bool:
        """Whether it is this project's own engine, as it is or with changes."""
        return self.base == OWN

    @property
    def base(self) -> str:
        """The name of the stack that it was before fields of it were changed."""
        return self.name.removesuffix(_CHANGED)

    def changed(self, **changes: Any) -> Stack:
        """With other values of some fields, which its name says; itself where they are the same."""
        other = replace(self, **changes)
        return self if other == self else replace(other, name=self.base + _CHANGED, source="")

    def usual_accumulation(self, zero: int, pp: int, *, leave: bool = False) -> Literal["sharded", "local"]:
        """``accumulate`` of a strategy that does not name it; gradients that ``leave`` the device are shards."""
        stages = {"whole": (2, 3), "sharded by zero-3": (2,), "sharded": ()}[self.pipeline_gradients]
        return "local" if zero in stages and pp > 1 and not leave else "sharded"

    @property
    def launched_by_graphs(self) -> bool:
        """Whether no kernel of a layer waits for the host."""
        return self.cuda_graphs in ("full", "step")

    def forwards_ahead(self, strategy: Strategy, record: ScheduleRecord) -> int:
        """Forward passes that a pipeline runs earlier, to have a microbatch beside the exchange of another's tokens."""
        beside = strategy.ep > 1 and strategy.overlap.ep and self.ep_overlap == "microbatches"
        return record.ahead_of_exchange if beside and strategy.pp > 1 else 0

    def for_experts(self, recipe: Recipe) -> Recipe:
        """What routed experts are computed in."""
        return replace(recipe, wide_experts=not self.fp8_experts).of_experts

    def stores(self, recipe: Recipe, *, whole_masters: bool = False) -> Recipe:
        """The recipe in the bytes that this stack keeps of every parameter; in fp32 those of ``whole_masters``."""
        recipe = replace(recipe, wide_experts=not self.fp8_experts)
        if self.masters == "none" and recipe.master:
            return replace(recipe, gradient=recipe.weight, master=0)
        if self.masters == "16-bit" and recipe.master:
            return replace(recipe, master=2)
        if self.sharded_parameters == "fp32" and recipe.master:
            return replace(recipe, weight=4, copies=0, gradient=4, master=0)
        if self.sharded_parameters == "fp32 shards":
            recipe = replace(recipe, fp32_shards=True)
        if self.masters == "rest" and recipe.wide == "bf16" and not whole_masters:
            recipe = replace(recipe, master=2)
        if recipe.compute not in ("fp8", "fp4"):
            return recipe
        # Megatron's gradient buffer has the format it is reduced in (--grad-reduce-in-fp32 or not).
        kept = replace(recipe, gradient=2) if self.gradient_reduce == "bf16" else recipe
        if self.parameter_gather == "fp8" and recipe.compute == "fp8":
            # --fp8-param-gather: the two FP8 forms are the weights, 16-bit ones exist in no rank.
            return replace(kept, weight=recipe.copies / 2, copies=recipe.copies / 2)
        return kept


def stack_from(value: Any) -> Stack:
    """The stack that a preset name, a file or a mapping describes."""
    return presets.resolve("stack", Stack, value)


def default_stack() -> Stack:
    """This project's own engine."""
    return stack_from(OWN)
