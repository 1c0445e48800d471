"""The software stack that runs a job, as flags and kinds; never as fitted numbers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardwise.spec import presets
from shardwise.spec.codec import Spec, count
from shardwise.spec.model import Model
from shardwise.spec.schedules import ScheduleRecord, StepEnds
from shardwise.spec.strategy import Overlap, Strategy
from shardwise.spec.training import PrecisionName, Recipe, Training

OWN = "shardwise"
_CHANGED = "-changed"
_OF_MIXTURES = ("cuda_graphs", "fused_moe_mlp", "fused_permute", "dispatch")
# Rows of the fullest expert over the mean, early in a training run (Tutel, Hwang et al. 2022, arXiv 2206.03382, section
# 2: what an expert needs changes up to 4.38 times within a run); all tokens choose the same experts at most.
_FULLEST_EXPERT = 4.38

Graphs = Literal["none", "partial", "full", "step"]
Dispatch = Literal["all-to-all", "deduplicated"]


@dataclass(frozen=True, kw_only=True)
class ForMixtures(Spec):
    """What a framework does otherwise with mixtures of experts: releases bring it for some number formats and devices
    first. A field that is left out is as the `Stack` has it."""

    precision: tuple[PrecisionName, ...] = ()
    """Recipes that it holds for; all, if none is named."""
    devices: tuple[str, ...] = ()
    """Devices that it holds for, by name; all, if none is named."""
    cuda_graphs: Graphs | None = None
    """As of the `Stack`."""
    fused_moe_mlp: bool | None = None
    """As of the `Stack`."""
    fused_permute: bool | None = None
    """As of the `Stack`."""
    dispatch: Dispatch | None = None
    """As of the `Stack`."""
    overlap_ep: bool | None = None
    """As ``overlap.ep`` of the `Stack`."""

    def holds(self, precision: str, device: str) -> bool:
        return (not self.precision or precision in self.precision) and (not self.devices or device in self.devices)


@dataclass(frozen=True, kw_only=True)
class Stack(Spec):
    """What a training framework does by itself: kernels it fuses, what it overlaps, in which format it reduces."""

    name: str = "custom"
    """Preset it comes from; `-changed` is appended where fields differ."""

    # -- overlap

    overlap: Overlap = field(default_factory=Overlap)
    """What a job on this stack overlaps unless its strategy says otherwise."""
    tp_overlap: Literal["decomposed", "buffers"] = "decomposed"
    """How tp overlaps: a matmul cut into pieces (async TP), or tiles sent as they are made (user buffers)."""
    tp_gradients: Literal["beside", "in turn"] = "beside"
    """Backward collectives of a split matmul run beside its weight gradient, which does not need them, or in turn."""
    tp_inputs: Literal["shared", "each"] = "shared"
    """Projections that read the same hidden states gather them once, and sum their gradients once, or each by itself,
    as DTensor's ColwiseParallel does on every projection; it keeps what a repeated layer gathers for the backward
    pass."""
    ep_overlap: Literal["microbatches", "chunks"] = "microbatches"
    """Exchanges of tokens overlap other microbatches, as some schedules run them, or other chunks of the same
    tokens."""
    scattered_messages: bool = False
    """Tensor-parallel ranks send a part each of equal activations to the next stage, which gathers them."""
    step_ends: StepEnds = "together"
    """`together`: the gradient norm synchronises pipeline ranks. `apart`: they update first and repair the update once
    the norm is known (post-validation, Qi et al. 2023, arXiv 2401.10241, section 4)."""

    # -- gradients, ZeRO and formats on the wire

    gradient_reduce: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are reduced."""
    parameter_gather: Literal["bf16", "fp8"] = "bf16"
    """Format in which FP8 recipes gather parameters."""
    pipeline_gradients: Literal["whole", "sharded by zero-3", "sharded"] = "sharded by zero-3"
    """ZeRO under a pipeline reduces once a step (`whole`, gradients are kept whole until then), after every microbatch
    under ZeRO-3 alone (as Megatron-LM's distributed optimizer up to ZeRO-2), or under ZeRO-2 too; see
    `usual_accumulation`."""
    accumulation: Literal["sharded", "local"] = "sharded"
    """Without a pipeline, ZeRO-2 and 3 reduce gradients after every microbatch, or keep them whole until the last, in
    the format they are reduced in, as FSDP does where scripts forbid it to synchronise."""
    per_parameter_shards: bool = False
    """ZeRO-1 cuts every parameter by itself and gathers after the update: a copy per parameter and rank."""
    owned_parameters: bool = False
    """ZeRO-1 gives every parameter whole to one rank, which updates it and broadcasts it to the others afterwards;
    gradients are all-reduced. Else ranks hold equal parts of all."""
    per_parameter_gathers: bool = False
    """ZeRO-3 gathers and reduces every parameter by itself, as a list of the ranks' parts, which PyTorch copies one
    by one."""
    bucket_per_rank: int = count(0, minimum=0, maximum=10**9)
    """ZeRO-1 and 2 reduce and gather so many parameters at a time for every data-parallel rank, where that is more than
    a layer: buckets that grow with the ring, so that its latency does not."""
    sharded_parameters: Literal["16-bit", "fp32", "fp32 shards"] = "16-bit"
    """Parameters under ZeRO: 16-bit; fp32, which are the masters too; or fp32 shards beside whole 16-bit parameters
    that are gathered from them every step, as FSDP does at every ZeRO stage (embedding and head once for both passes,
    sums of shards copied after the last microbatch)."""
    masters: Literal["fp32", "rest", "16-bit", "none"] = "fp32"
    """Masters of bf16 weights: fp32; only their lower 16 bits, with the weights as the upper ones; a 16-bit copy; or
    none, so that the optimizer updates the 16-bit weights by 16-bit gradients."""
    update_elements: int = count(0, minimum=0, maximum=10**18)
    """Gradients the update copies at a time, into one tensor and then into the masters' format (ZeRO-3; see
    `update_copies`). 0: they are read in place."""
    adamw: Literal["in place", "one by one", "foreach", "foreach unsharded"] = "in place"
    """One fused kernel, or one for every arithmetic step: of one tensor after another, or of all at once (`foreach`,
    torch's default), with the square roots of all second moments held meanwhile. That holds for flat shards (FSDP1)
    too; FSDP2's are updated one by one, unless the script asks for more (`foreach unsharded`)."""
    dispatch: Dispatch = "all-to-all"
    """How tokens reach their experts, unless the strategy says otherwise."""
    exchange_units: int = count(0, minimum=0, maximum=10**4)
    """Compute units that kernels of a deduplicated exchange occupy; 0: as many as other collectives."""
    fp8_dispatch: bool = False
    """Tokens are sent to experts in FP8."""

    # -- memory

    gathers: Literal["layers", "matrices"] = "layers"
    """What ZeRO-3 has whole at a time: layers, or single matrices, as where XLA gathers what an operator reads."""
    ends: Literal["kept", "head kept", "freed"] = "kept"
    """Embedding and head under ZeRO-3, gathered together with the root module, stay so for the backward pass; or are
    freed as layers are, so that nothing is gathered at the loss (FSDP2 where the script gives `reshard_after_forward`);
    or each is gathered by itself, and only the head stays."""
    whole_ends: Literal["none", "embedding", "both"] = "none"
    """What every tensor-parallel rank has whole of embedding and head."""
    full_recompute: Literal["whole", "as needed"] = "whole"
    """Repeats the whole layer, or all but its last matmul, whose output no backward pass reads."""
    loss: Literal["parallel", "steps", "copied", "plain", "compiled", "whole", "fused", "pieces"] = "parallel"
    """Cross entropy: split over the vocabulary (`parallel`); the same, with new tensors in each compiled step (`steps`)
    or on an fp32 copy of the logits (`copied`); torch's own on such a copy (`plain`), or compiled to read 16-bit logits
    (`compiled`); torch's on 16-bit logits, gathered over tensor-parallel ranks (`whole`); 16-bit logits turned into
    their gradient in place (`fused`); a few tokens' logits at a time (`pieces`)."""
    shifted_logits: bool = False
    """A plain loss reads a copy of the logits without the last token's (transformers up to 4.44, modeling_llama.py:
    shift_logits). Blocks of one size cannot take tensors of the other, so that the allocator reserves more."""
    gated_activation: Literal["fused", "separate"] = "fused"
    """`separate`: the gate is a kernel of its own and keeps its output."""
    norms: Literal["fused", "separate", "fp32"] = "fused"
    """`separate`: RMS norms as transformers writes them, which keep an fp32 input and their output before the
    weight; `fp32`: that output in fp32 too."""
    attention_by_heads: bool = False
    """Attention reads tensors in which sequences lie by heads, keys and values repeated for every query head, and its
    output is copied for the projection (`repeat_interleave`, scaled_dot_product_attention, `transpose`)."""
    autocast: bool = False
    """Whole fp32 weights compute in 16 bits under `torch.autocast`, without ZeRO; see `Job.autocasts`."""
    key_value_cache: bool = False
    """The model returns keys and values with its loss."""
    dummy_gradients: bool = False
    """An empty 16-bit gradient of every shape of weight stays allocated."""
    late_gradients: bool = False
    """16-bit gradients are added to fp32 ones after a whole backward pass."""
    deferred_head_gradients: int = 0
    """Microbatches whose head gradient waits for the end of the pipeline."""
    gradients: Literal["kept", "made", "replaced"] = "kept"
    """Allocated from the start (`kept`); made in the backward pass, so that one microbatch's never meet all its
    activations (`made`); or made while the last step's may stay until the loss (`replaced`)."""
    adapters: Literal["16-bit", "fp32", "added", "fused"] = "16-bit"
    """Adapters: products and sums in the format of the base (`16-bit`); kept in fp32 under autocast, which casts what
    they read, before its dropout and after (`fp32`, as PEFT: tuners/lora/layer.py, _cast_input_dtype); summed by their
    products themselves in the forward pass (`added`, as this engine) or in both (`fused`, as Unsloth's
    kernels/fast_lora.py)."""
    adapter_units: Literal["shared", "own"] = "shared"
    """`own`: ZeRO-3 gathers and reduces every matrix of an adapter by itself, since FSDP1 flattens only what is all
    trained or all frozen (PEFT, utils/other.py, fsdp_auto_wrap_policy). Then nothing hides the gather of a layer: FSDP1
    runs two units ahead (torch/distributed/fsdp/_limiter_utils.py), and these are adapters."""
    quantised_inputs: Literal["kept", "kept over losses", "freed"] = "freed"
    """Inputs of products with a quantised base, which no gradient reads: bitsandbytes kept them up to 0.43.1
    (autograd/_functions.py, MatMul4Bit: `ctx.tensors = (A, B)`; not since its pull request 1270), until a script lets
    go of the loss: before the next pass, or only when that has a loss of its own (`kept over losses`)."""
    dequantised_by: Literal["kernel", "operators"] = "kernel"
    """What makes a weight of its codes before each use: one kernel, or torch's operators, which autograd keeps the
    weight of until its backward pass (AutoGPTQ without a kernel for training: qlinear_cuda_old.py, forward)."""
    trained_copies: bool = False
    """What else is trained beside adapters is a copy in the format of the base, which the optimizer updates as it is,
    and the original stays (PEFT, utils/other.py, ModulesToSaveWrapper)."""
    joined_projections: bool = False
    """Queries, keys and values are one product, as in LitGPT (model.py, CausalSelfAttention; lora.py, LoRAQKVLinear):
    its adapters drop their common input once, and where they are of some of the three what they add is kept to be put
    in its place (index_copy). Attention keeps values as a part of that tensor; those of grouped heads, and their keys,
    it has for every head."""
    hooked_inputs: bool = False
    """Under ZeRO-3 the input of a frozen layer that is repeated, and its gradient, stay until the backward pass ends: a
    hook of FSDP1 holds the node that accumulates the gradient (torch/distributed/fsdp/_runtime_utils.py,
    _register_post_backward_reshard_only_hook), where checkpoints are re-entrant."""
    flat_parameters: Literal["uniform", "mixed"] = "uniform"
    """`mixed`: under ZeRO-3 frozen weights have gradients where trained ones are in the same layer. FSDP1 makes one
    parameter of both, of which all needs a gradient (torch/distributed/fsdp/_flat_param.py,
    _validate_tensors_to_flatten, with `use_orig_params`)."""
    loads_whole: bool = False
    """Under ZeRO-3 every device has all weights once, beside its shards, to load a checkpoint (FSDP1's
    summon_full_params)."""
    upcast_base: bool = False
    """What a quantised base keeps in 16 bits becomes fp32, so that hidden states between layers are too (PEFT's
    prepare_model_for_kbit_training)."""
    kept_router_losses: bool = False
    """A router has its last auxiliary loss as an attribute. In a repeated layer that is the loss of the second forward
    pass, whose graph no backward pass frees: all that lies before the router stays until the next forward pass."""
    expert_outputs: Literal["weighted", "kept"] = "weighted"
    """`kept` where they are weighted after they return to their tokens."""
    saved_activations: Literal["16-bit", "8-bit"] = "16-bit"
    """`8-bit`: an FP8 recipe that also saves inputs of gated activations in FP8, and one attention output in 12 bits
    for its own backward pass and the projection's (DeepSeek-V3, arXiv 2412.19437, section 3.3.3)."""
    gathered_inputs: Literal["16-bit", "recipe", "whole"] = "recipe"
    """Inputs that sequence parallelism gathers: each rank's part is saved, in 16 bits or as the recipe saves other
    inputs; or what was gathered, by a plain product, which also keeps its copy of interleaved attention outputs
    (`whole`)."""
    stacked_queries: bool = False
    """Queries of as many heads as keys stay a view of the tensor that they share with keys and values, of which
    attention reads copies (nanotron, models/llama.py, CausalSelfAttention)."""
    latents: Literal["cut", "whole"] = "cut"
    """Latent vectors of MLA: whole on every tensor-parallel rank, or cut and gathered again, as Megatron-LM does."""
    message_buffers: Literal["one", "per microbatch"] = "one"
    """Pipeline messages: one buffer per direction, or one per microbatch too, with all outputs of the stage beside
    them."""
    allocator: Literal["segments", "expandable"] = "segments"
    """PyTorch's allocator: fixed or expandable segments."""
    layer_launches: int = 0
    """Kernels of a layer's forward pass, where tensors of collectives wait for the device: what PyTorch reserves beyond
    its tensors."""

    # -- kernels

    attention: Literal["unfused", "flash-1", "flash-2", "fused"] = "fused"
    """Attention kernel."""
    elementwise: Literal["fused", "compiled", "eager"] = "fused"
    """Norms, activations and residuals: hand-written fused kernels, compiled, or one kernel each."""
    casts: Literal["fused", "transposed", "separate"] = "transposed"
    """Casts to FP8: written with their transpose (`transposed`), partly by the kernel before (`fused`), or by kernels
    of their own, again in the backward pass (`separate`, as torchao)."""
    odd_sizes: Literal["padded", "as given"] = "padded"
    """Matmuls of which a dimension is odd, most often the vocabulary's: padded to whole vectors (Megatron-LM pads its
    vocabulary, XLA every matmul), or multiplied as they are, for which cuBLAS has no fast kernel."""
    fp8_experts: bool = True
    """Routed experts are multiplied in FP8 or FP4 where other linear layers are."""
    fused_moe_mlp: bool = False
    """Biases of experts are added inside the kernels of their MLP."""
    fused_permute: bool = False
    """Tokens are sorted by expert in one kernel."""
    experts: Literal["grouped", "in turn", "padded"] = "grouped"
    """Experts of a device: one grouped matmul, which has workspaces, one after another, or one batched matmul of as
    many rows for every expert as the fullest one has."""
    parallel_blocks: Literal["joined", "apart"] = "joined"
    """Attention and MLP side by side share the moves of tensor parallelism, or not."""
    layers: Literal["torch", "megatron", "transformer engine"] = "torch"
    """Whose layers: Transformer Engine has a workspace and keeps FlashAttention's output by sequence; Megatron's own
    keep a buffer of scores."""
    deterministic: bool = False
    """cuBLAS has larger workspaces."""

    # -- host

    cuda_graphs: Graphs = "none"
    """What of a step is launched as CUDA graphs."""
    launches: Literal["ahead", "one by one"] = "ahead"
    """`one by one`: Python launches every kernel of a layer, which takes a host so long (`host_seconds` of a device's
    efficiency) that small microbatches wait for it; `ahead`: it is never the limit."""
    module_hooks: bool = False
    """ZeRO-3 fetches and releases parameters from Python, before and after every module of a layer in each pass."""
    routing: Literal["dropless", "capacity", "on device"] = "dropless"
    """Tokens per expert: read by the host (`dropless`), fixed (`capacity`), or known to the device alone."""

    mixtures: tuple[ForMixtures, ...] = ()
    """How mixtures of experts are run otherwise, by number format and device; the first that holds counts."""

    # -- origin

    source: str = ""
    """Where its values are documented."""

    @property
    def is_own(self) -> bool:
        """Whether it is this project's own engine, as it is or with changes."""
        return self.base == OWN

    @property
    def base(self) -> str:
        """The name of the stack that it was before fields of it were changed, whatever its version."""
        return self.version.partition("@")[0]

    @property
    def version(self) -> str:
        """As `base`, with the version that it names."""
        return self.name.removesuffix(_CHANGED)

    def changed(self, **changes: Any) -> Stack:
        """With other values of some fields, which its name says; itself where they are the same."""
        other = replace(self, **changes)
        return self if other == self else replace(other, name=self.name.removesuffix(_CHANGED) + _CHANGED, source="")

    def usual_accumulation(self, zero: int, pp: int, *, leave: bool = False) -> Literal["sharded", "local"]:
        """``accumulate`` of a strategy that does not name it; gradients that ``leave`` the device are shards."""
        stages = {"whole": (2, 3), "sharded by zero-3": (2,), "sharded": ()}[self.pipeline_gradients]
        is_local = zero in stages if pp > 1 else zero >= 2 and self.accumulation == "local"
        return "local" if is_local and not leave else "sharded"

    @property
    def joins_adapters(self) -> bool:
        """Whether one adapter serves queries, keys and values, whose product is one (Megatron's linear_qkv)."""
        return self.layers != "torch" or self.joined_projections

    def has_adapter_units(self, training: Training, strategy: Strategy) -> bool:
        """Whether ZeRO-3 gathers every matrix of an adapter by itself."""
        sharded = strategy.zero == 3 and not strategy.keep_parameters
        return self.adapter_units == "own" and training.adapters is not None and sharded

    def gathers_by_host(self, training: Training, strategy: Strategy) -> bool:
        """Whether the host takes so much part in the gathers of ZeRO-3 that layers wait for it."""
        return self.has_adapter_units(training, strategy) or (self.module_hooks and strategy.zero == 3)

    def upcasts(self, recipe: Recipe) -> bool:
        """Whether a frozen base keeps embedding, norms and head in fp32."""
        return self.upcast_base and recipe.base is not None and recipe.base < 2

    def head_tensor_parallel(self, tp: int) -> int:
        """Ranks that split the output projection, of ``tp``."""
        return 1 if self.whole_ends == "both" else tp

    def rows_of_experts(self, model: Model) -> float:
        """How many times the rows of balanced routing the experts of a device compute."""
        return min(_FULLEST_EXPERT, self.most_rows_of_experts(model))

    def most_rows_of_experts(self, model: Model) -> float:
        """The same in the fullest layer: with weights that are still random all tokens of some layer choose the same
        experts (bench/routing.py)."""
        return model.moe.experts / model.moe.top_k if self.experts == "padded" and model.moe else 1.0

    @property
    def launched_by_graphs(self) -> bool:
        """Whether no kernel of a layer waits for the host."""
        return self.cuda_graphs in ("full", "step")

    def forwards_ahead(self, strategy: Strategy, record: ScheduleRecord) -> int:
        """Forward passes that a pipeline runs earlier, to have a microbatch beside the exchange of another's tokens."""
        beside = strategy.ep > 1 and strategy.overlap.ep and self.ep_overlap == "microbatches"
        return record.ahead_of_exchange if beside and strategy.pp > 1 else 0

    def running(self, precision: str, device: str, *, moe: bool) -> Stack:
        """With what it does otherwise for mixtures, where the model is one."""
        own = next((rule for rule in self.mixtures if rule.holds(precision, device)), None) if moe else None
        if own is None:
            return self
        changes = {name: getattr(own, name) for name in _OF_MIXTURES if getattr(own, name) is not None}
        if own.overlap_ep is not None:
            changes["overlap"] = self.overlap.unchecked(ep=own.overlap_ep)
        return self.unchecked(**changes)

    def stated(self, **changes: Any) -> Stack:
        """With other values of some fields, which hold for mixtures too whatever the stack does by itself."""
        unsaid: dict[str, Any] = {name: None for name in _OF_MIXTURES if name in changes}
        if "overlap" in changes:
            unsaid["overlap_ep"] = None
        rules = tuple(replace(rule, **unsaid) for rule in self.mixtures) if unsaid else self.mixtures
        return self.changed(**{"mixtures": rules, **changes})

    def for_experts(self, recipe: Recipe) -> Recipe:
        """What routed experts are computed in."""
        return replace(recipe, wide_experts=not self.fp8_experts).of_experts

    def stores(self, recipe: Recipe, *, whole_masters: bool = False) -> Recipe:
        """The recipe in the bytes that this stack keeps of every parameter; in fp32 those of ``whole_masters``."""
        recipe = replace(
            recipe,
            wide_experts=not self.fp8_experts,
            frozen_plain=4 if self.upcasts(recipe) else 2,
            frozen_gradients=self.flat_parameters == "mixed",
            trained_copies=self.trained_copies and recipe.base is not None,
        )
        if self.masters == "none" and recipe.master:
            sums = 4 if self.gradient_reduce == "fp32" else recipe.weight
            return replace(recipe, gradient=recipe.weight, master=0, whole_gradient=sums)
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
