"""Megatron-LM's options: none that is read is dropped, whatever stands beside it; scripts with gaps are not priced."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shardwise.cost.analysis import analyze
from shardwise.interop import frameworks
from shardwise.interop.frameworks import TARGETS
from shardwise.interop.frameworks.job_fields import Imported
from shardwise.spec import SpecError
from shardwise.spec.clusters import cluster_from
from shardwise.spec.job import Job
from shardwise.spec.stack import stack_from

MEGATRON = TARGETS["megatron"]
CLUSTER = cluster_from("dgx-h100:2")
SHAPE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 1 --global-batch-size 32 --train-iters 100 --lr 1e-4 "
)
LATENT = "--multi-latent-attention --q-lora-rank 64 --qk-layernorm "
BASES = {
    "plain": SHAPE,
    "split": SHAPE + "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
    "--num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce "
    "--overlap-param-gather --defer-embedding-wgrad-compute --swiglu --group-query-attention",
    "experts": SHAPE + LATENT + "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type flex --use-distributed-optimizer --recompute-granularity full "
    "--recompute-method block --moe-router-enable-expert-bias --moe-router-score-function sigmoid --rope-type yarn "
    "--mtp-num-layers 1 --window-size 127,0",
    "sharded": SHAPE + "--use-megatron-fsdp --use-precision-aware-optimizer --optimizer-cpu-offload "
    "--cross-entropy-loss-fusion --cuda-graph-impl local --recompute-granularity selective --overlap-grad-reduce",
    "stepped": SHAPE + "--optimizer sgd --use-torch-fsdp2 --lr-decay-style WSD --use-rope-scaling --deepspeed",
    "muon": SHAPE + "--optimizer muon --use-distributed-optimizer --overlap-grad-reduce --disable-bias-linear",
}  # fmt: skip
PRECISIONS = {
    "fp32": "",
    "bf16": "--bf16",
    "fp16": "--fp16",
    "fp8": "--bf16 --fp8-format hybrid",
    "fp4": "--bf16 --fp4-format e2m1",
}
VALUES = ("2", "1", "0.5", "0", "64", "4", "none", "bf16", "fp16", "full", "selective", "local", "te", "deepep",
          "full_iteration", "allgather", "mxfp8", "e4m3", "e2m1", "block", "optim_grads", "moe_act", "max", "rope",
          "yarn", "linear", "RMSNorm", "unfused", "sgd", "63,0", "[0]*4+[1]*4", "Et*2|t*2|t*2|t*2L", "0:16 1B:64",
          "sigmoid", "softmax", "NullTokenizer", "500M", "nvfp4", "a2a")  # fmt: skip


def mentioned() -> list[str]:
    """The options that the importer names anywhere."""
    folder = Path(frameworks.__file__).parent
    files = [path for path in folder.glob("*.py") if path.stem.startswith(("megatron", "training_values"))]
    named = {name for path in files for name in re.findall(r'"(--[a-z][\w-]+)"', path.read_text(encoding="utf-8"))}
    return sorted(name for name in named & MEGATRON.names.exact if not MEGATRON.names.ignores(name))


@cache
def outcome(text: str) -> tuple[Any, ...] | str:
    try:
        read = MEGATRON.read(text, None, CLUSTER)
    except SpecError as error:
        return str(error)
    return dict(read.fields), read.notes, read.unused, read.no_model


def changes(option: str, value: str, base: str, of: str) -> bool:
    """Whether the option, given last, changes what is read from a command line: the job, or what is said of it."""
    plain = f"{BASES[base]} {PRECISIONS[of]} "
    return outcome(f"{plain} {option} {value}") != outcome(plain)


def an_effect(option: str) -> tuple[str, str, str] | None:
    """A value of the option that has an effect, on which command line and in which precision."""
    values = [""] if option in MEGATRON.names.switches else VALUES
    cases = ((value, base, of) for of in ("bf16", "fp8", "fp16") for base in BASES for value in values)
    return next((case for case in cases if changes(option, *case)), None)


def test_no_option_that_is_read_is_dropped_beside_another_precision() -> None:
    dropped = []
    for option in mentioned():
        found = an_effect(option)
        if found is None:
            dropped.append(option)
        elif found[2] == "bf16":
            value, base, _ = found
            others = (of for of, given in PRECISIONS.items() if option not in given.split())
            dropped += [f"{option} {value} beside {of}" for of in others if not changes(option, value, base, of)]
    assert not dropped


# NVIDIA's examples/llama/train_llama3_8b_h100_fp8.sh at d98e8a64ddf3, in the layout of its README: 13,812 tokens/s/GPU.
FP8_8B = """torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192
--position-embedding-type rope --rotary-base 1000000 --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu
--normalization RMSNorm --attention-backend fused --apply-layernorm-1p --untie-embeddings-and-output-weights
--disable-bias-linear --micro-batch-size 1 --global-batch-size 128 --lr 0.00015 --bf16 --grad-reduce-in-bf16
--cross-entropy-loss-fusion --fp8-format hybrid --fp8-amax-history-len 1024 --fp8-amax-compute-algo max
--fp8-param-gather --context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
--vocab-size 128256""".replace("\n", " ")


def job_of(text: str, cluster: str) -> Job:
    machines = cluster_from(cluster)
    return MEGATRON.read(text, None, machines).job(machines)


def test_a_published_layout_in_fp8_fits_as_it_did() -> None:
    job = job_of(FP8_8B, "dgx-h100:1")
    assert not MEGATRON.read(FP8_8B, None, job.cluster).unused
    priced = analyze(job)
    assert priced.fits
    assert job.tokens_per_step / priced.predicted_seconds / 8 == pytest.approx(13_812, rel=0.1)
    for option, more in (("--grad-reduce-in-bf16", 2.0), ("--fp8-param-gather", 2.0)):  # bytes a parameter
        without = analyze(job_of(FP8_8B.replace(option, ""), "dgx-h100:1"))
        assert without.memory.total - priced.memory.total > 0.85 * more * 8.0e9  # of matrices


@pytest.mark.parametrize("precision", ["fp8", "bf16-fp32-grads"])
@pytest.mark.parametrize(
    "changes",
    [{"gradient_reduce": "bf16"}, {"parameter_gather": "fp8"}, {"loss": "fused"}, {"loss": "steps"},
     {"deterministic": True}, {"cuda_graphs": "full"}, {"dummy_gradients": False}],
)  # fmt: skip
def test_what_is_changed_of_the_stack_is_written_and_read_again(changes: dict[str, Any], precision: str) -> None:
    text = FP8_8B.replace("--cross-entropy-loss-fusion", "").replace("--grad-reduce-in-bf16", "")
    job = job_of(text.replace("--fp8-param-gather", ""), "dgx-h100:1")
    training = job.training.unchecked(precision=precision)
    stack = stack_from("megatron-core").changed(**changes)
    job = job.unchecked(stack=stack, training=training)
    back = MEGATRON.read_back(job, MEGATRON.text(job)).job(job.cluster)
    assert back.recipe == job.recipe
    without_effect = precision != "fp8" and not {"gradient_reduce", "parameter_gather"}.isdisjoint(changes)
    assert back.stack == (stack_from("megatron-core") if without_effect else stack)


@pytest.mark.parametrize("option", ["--checkpoint-activations", "--deepspeed-activation-checkpointing"])
def test_checkpointed_activations_are_recomputed_layers(option: str) -> None:
    assert MEGATRON.read(f"{SHAPE} {option}").fields["strategy.recompute"] == "full"


GAPS = ["<Specify path>", "<path>", "< path to data >", "${NOT_SET}", "$NOT_SET", "...", "…"]


@pytest.mark.parametrize("array", [False, True])
@pytest.mark.parametrize("gap", GAPS)
@pytest.mark.parametrize("option", ["--data-path", "--fp16", "--hidden-size", "--lr", "--tensor-model-parallel-size"])
def test_a_gap_in_a_script_hides_nothing_that_follows(option: str, gap: str, array: bool) -> None:
    """The price is that of the script without the gap, or there is none and one line says why."""
    words = SHAPE.replace("--lr 1e-4", "") + f"{option} {gap} --fp16 --swiglu"
    script = f"A=({words})\ntorchrun pretrain_gpt.py ${{A[@]}}" if array else f"torchrun pretrain_gpt.py {words}"
    priced = option in ("--hidden-size", "--tensor-model-parallel-size")
    try:
        read: Imported = MEGATRON.read(script)
    except SpecError as error:
        assert "\n" not in str(error) and (priced or gap in ("...", "…") or gap.startswith("< "))
        return
    assert not priced
    assert (read.fields["training.precision"], read.fields["model.activation"]) == ("fp16", "swiglu")
    shown = gap.strip("$").split()[0]
    assert option == "--data-path" or any(shown in note for note in read.notes)


# DeepSeek-V3 of 14 layers on 64 H100 (NVIDIA/Megatron-LM pull request 6429: 70,279 MB allocated with overlap, and in
# 6311 68,704 MB without).
EXPERTS = """torchrun pretrain_gpt.py --num-layers 14 --hidden-size 7168 --ffn-hidden-size 18432 --bf16
--num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-layernorm --swiglu
--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope
--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048
--moe-layer-freq [0]*3+[1]*11 --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-grouped-gemm
--mtp-num-layers 1 --seq-length 2048 --max-position-embeddings 4096 --vocab-size 129280 --micro-batch-size 1
--global-batch-size 256 --pipeline-model-parallel-size 4 --expert-model-parallel-size 16 --use-distributed-optimizer
--pipeline-model-parallel-layout Ett|(tt|)*6mL --moe-token-dispatcher-type alltoall --attention-dropout 0
--hidden-dropout 0""".replace("\n", " ").replace("Ett|(tt|)*6mL", "'Ett|(tt|)*6mL'")


def test_overlapped_experts_hold_a_chunk_more_under_interleaving() -> None:
    alone, beside = (
        analyze(job_of(EXPERTS + more, "dgx-h100:8")) for more in ("", " --overlap-moe-expert-parallel-comm")
    )
    mib = 2**20
    assert alone.memory.total / mib == pytest.approx(68_704, rel=0.05)
    assert (beside.memory.total - alone.memory.total) / mib == pytest.approx(70_279 - 68_704, rel=0.25)
