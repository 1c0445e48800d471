"""What each published source does not print, filled in from its public recipe, with the reason.

Chosen per source, never by the error it gives. `docs/accuracy.md` lists this table.
"""

from __future__ import annotations

from shardwise.accuracy.megatron import GPT3_BLOCK, MEGATRON_BRIDGE, MEGATRON_TESTS
from shardwise.accuracy.strangers import strangers
from shardwise.accuracy.table import Source, TableRow, Variant

EARLY_MEGATRON = "megatron-core@2022"

_TORCHTITAN = (
    Variant("rows marked eager", "no torch.compile", {"precision": "eager"}, stack={"elementwise": "eager"}),
    Variant(
        "pipelines",
        "weights stay gathered and gradients whole until the last microbatch; as many microbatches as "
        "stages (parallelize_llama.py, pipelining_utils.py at 9dec370)",
        {"pp": "^8$"},
        fill={"microbatches": "8"},
        strategy={"keep_parameters": True, "accumulate": "local"},
    ),
    Variant("interleaved pipelines", "two stages on each rank", {"schedule": "interleaved"}, fill={"vpp": "2"}),
    Variant(
        "H200, June 2025",
        "torchrun without run_train.sh, so without expandable segments",
        {"source": "h200"},
        version="torchtitan@2025",
        stack={"allocator": "segments"},
    ),
    Variant("async TP, June 2025", "torchtitan at 820504e", {"source": "2025-06"}, version="torchtitan@2025"),
    Variant("rows of async TP", "TP overlap on", {"locator": "async.?TP"}, stack={"overlap": {"tp": True}}),
)

_NVIDIA = r"H100|H200|B200|B300"  # also GB200 and GB300

_NEMO_MLPERF = (
    Variant(
        "GPT-3",
        "tied embeddings, learned positions and biases (logged)",
        {"model": "GPT"},
        model={"vocab": 50_688, **GPT3_BLOCK},
    ),
    Variant(
        "3.1",
        "FlashAttention 2.0.8, parameters gathered in bf16",
        {"source": r"v3\.1"},
        version="nemo@23.09",
    ),
    Variant(
        "4.0 on 1,344 and 1,452 nodes, 4.1 on B200",
        "CUDA graph of every layer",
        {"row_id": r"n1344_ngc24|n1452_ngc24|b200_n8"},
        stack={"cuda_graphs": "partial"},
    ),
    Variant("4.1 of NVIDIA", "fused cross entropy", {"row_id": r"^mlperf4\.1_NVIDIA"}, stack={"loss": "fused"}),
    Variant(
        "5.0 and 5.1",
        "data parallelism outermost, Transformer Engine's cross entropy, full-iteration CUDA graph",
        {"source": r"v5\."},
        model={"vocab": 128_256},
        strategy={"order": ["tp", "cp", "pp", "dp"]},
        version="nemo@25.09",
        stack={"cuda_graphs": "full"},
    ),
    Variant(
        "5.0 on H100 and H200",
        "no CUDA graph, parameters gathered in bf16",
        {"source": r"v5\.0", "gpu": "H[12]00"},
        stack={"cuda_graphs": "none", "parameter_gather": "bf16"},
    ),
    Variant(
        "NVFP4",
        "parameters gathered in bf16, no TP overlap, CUDA graph of every layer",
        {"precision": "fp4"},
        stack={"parameter_gather": "bf16", "overlap": {"tp": False}, "cuda_graphs": "partial"},
    ),
    Variant(
        "5.1, Nebius on B300", "full-iteration CUDA graph", {"row_id": "nebius_b300_n1"}, stack={"cuda_graphs": "full"}
    ),
    Variant("5.1, Supermicro AS-8126GS", "no CUDA graph", {"row_id": "AS-8126GS"}, stack={"cuda_graphs": "none"}),
)
_DGXC = (
    Variant(
        "GPT-3", "GPT-2's vocabulary, padded; dropout 0.1", {"model": "GPT.?3"}, model={"vocab": 50_688, **GPT3_BLOCK}
    ),
    Variant(
        "Nemotron4-15B",
        "fp32 gradient reduction, fused cross entropy",
        {"model": "15B"},
        stack={"gradient_reduce": "fp32", "loss": "fused"},
    ),
    Variant(
        "Nemotron4-340B",
        "CUDA graph of every layer, Transformer Engine's cross entropy",
        {"model": "340B"},
        stack={"cuda_graphs": "partial", "loss": "fused"},
    ),
    Variant(
        "Grok-1 of 25.02",
        "expert TP 4, FlashAttention-2, equal load by capacity 1.0",
        {"model": "Grok", "row_id": r"25\.02"},
        model={"vocab": 128_512},
        strategy={"expert_tp": 4},
        stack={"attention": "flash-2", "routing": "capacity"},
    ),
    Variant(
        "Grok-1 of 25.05",
        "Transformer Engine's cross entropy",
        {"model": "Grok", "row_id": r"25\.05"},
        model={"vocab": 128_512},
        stack={"loss": "fused"},
    ),
)
_PAXML = (
    Variant(
        "175B",
        "FSDP over 128 GPUs; attention, norms, activations and the first matmul of the MLP repeated",
        {"model": "175B"},
        model={"vocab": 50_257},
        strategy={
            "shard_group": 128,
            "recompute": "selective",
            "recompute_operators": ["attention", "norm", "activation", "mlp-up"],
        },
    ),
    Variant(
        "5B",
        "FSDP over the node's 8 GPUs; element-wise work repeated",
        {"model": r"\b5B"},
        model={"vocab": 50_304},
        strategy={"shard_group": 8, "recompute": "selective", "recompute_operators": ["norm", "activation"]},
    ),
)
_MPT = (
    Variant("all", "MPT: tied embeddings, learned positions, biases", {}, model=GPT3_BLOCK),
    Variant("MP mode PURE", "gradients reduced in bf16", {"notes": "MP mode PURE"}, stack={"gradient_reduce": "bf16"}),
    Variant(
        "128 GPUs or more",
        "sweep.py of January 2024",
        {"locator": "Large Scale"},
        version="composer-fsdp@2024",
    ),
)
_MAXTEXT = (
    Variant("TPU v4", "plain attention of April 2023", {"gpu": "v4"}, version="maxtext@2023.04"),
    Variant(
        "128B on TPU v5e",
        "whole layers repeated: the offload of projections came in April 2024, after the figures",
        {"gpu": "v5e", "recompute": "offload"},
        strategy={"recompute": "full"},
    ),
)
_MINDSPEED = (
    Variant(
        "scripts with --use-mc2",
        "matmuls fused with TP's collectives",
        {"notes": r"mc2 \(TP matmul"},
        stack={"overlap": {"tp": True}, "tp_overlap": "buffers"},
    ),
    Variant(
        "scripts with --overlap-grad-reduce",
        "gradients reduced beside the backward pass",
        {"notes": "overlap-grad-reduce"},
        stack={"overlap": {"dp": True}},
    ),
    Variant(
        "Baichuan-13B, Bloom-176B", "scores stored", {"notes": "no flash attention"}, stack={"attention": "unfused"}
    ),
    Variant(
        "legacy models",
        "SwiGLU and rotary embedding not fused",
        {"notes": "Legacy implementation"},
        stack={"elementwise": "eager", "gated_activation": "separate"},
    ),
)
_PRIMUS = (
    Variant("Llama2-7B", "32 microbatches (pp_simulation.yaml) of one sequence: the 4 of llama2_7B's configuration "
            "would take 43 GiB, where 16 are printed", {"model": "Llama2-7B"}, fill={"mbs": "1", "microbatches": "32"}),
    Variant("Llama3.1-8B", "8 microbatches on any number of nodes", {"model": r"Llama3\.1-8B"},
            fill={"microbatches": "8"}),
    Variant("Llama3.1-70B", "torch FSDP2, one microbatch, 72 layers recomputed (its MI325X files)", {"model": "70B"},
            fill={"microbatches": "1"}, strategy={"recompute": "full", "recompute_layers": 72},
            stack={"sharded_parameters": "fp32", "gradients": "made"}),
    Variant("Qwen3-235B", "32 microbatches of 4, DeepEP, bf16 gradients", {"model": "235B"},
            fill={"mbs": "4", "microbatches": "32"}, stack={"dispatch": "deduplicated", "gradient_reduce": "bf16"}),
)  # fmt: skip

# The first that covers a row describes it.
SOURCES = (
    *strangers(_TORCHTITAN),
    Source(
        "MLPerf, NVIDIA's NeMo code", "mlcommons|mlperf", "nemo@24.04",
        "configuration scripts and logs of the submissions: SP, no recompute, distributed Adam; attention, CUDA graphs "
        "and format of the parameter gather by round", cells={"gpu": _NVIDIA}, vocab=50_688, variants=_NEMO_MLPERF,
    ),
    Source(
        "MLPerf, TPU", "mlcommons|mlperf", "maxtext@2023.12",
        "MaxText and PAX forks of the submissions: int8 matmuls in the layers",
        cells={"gpu": "TPU"}, zero=3, microbatch="local batch", vocab=50_304, variants=_MAXTEXT,
    ),
    Source(
        "MLPerf, Gaudi 2", "mlcommons|mlperf", "habana-deepspeed", "run_gpt.sh: 1F1B, ZeRO stage 0, SP",
        cells={"gpu": "Gaudi"}, zero=0, vocab=50_688,
    ),
    Source(
        "MLPerf, AMD", "mlcommons|mlperf", "nemo@24.04", "NeMo on ROCm: FP8 parameters and gather, bf16 reduction",
        cells={"gpu": "^MI"}, vocab=128_256,
    ),
    Source(
        "NVIDIA/dgxc-benchmarking, Paxml", "dgxc-benchmarking", "paxml",
        "recipes of 24.11: FSDP inside a group, replicas between groups", cells={"row_id": "paxml"},
        convention="full-attention", zero=3, microbatch="local batch", variants=_PAXML,
    ),
    Source(
        "NVIDIA/dgxc-benchmarking, NeMo", "dgxc-benchmarking", "nemo@24.04",
        "recipes at the row's commit: SP, no recompute, distributed Adam, bf16 reduction unless listed",
        convention="full-attention", variants=_DGXC,
    ),
    Source(
        "mosaicml/llm-foundry", "llm-foundry", "composer-fsdp@2023",
        "benchmarking scripts at b2a43a147 and 5e85bd62d: PyTorch 2.1, eager FSDP1, fp32 reduction of every microbatch",
        convention="full-attention", zero=3, microbatch="local batch", vocab=50_368,
        variants=_MPT,
    ),
    Source(
        "AI-Hypercomputer/maxtext", "maxtext", "maxtext@2023.12",
        "launch scripts of the commits that printed the figures (281e04bf3, 28816574b, 76bd53b0f)",
        convention="full-attention", zero=3, microbatch="local batch", variants=_MAXTEXT,
    ),
    Source(
        "Ascend/MindSpeed-LLM", "mindspeed|modellink", "mindspeed",
        "example scripts of the commit that printed the table", zero=0, variants=_MINDSPEED, fp32_gradients=True,
    ),
    Source(
        "AMD-AGI/Primus", "primus", "primus",
        "Megatron configurations of the repository (MI300X files up to March 2026)",
        vocab=128_256, variants=_PRIMUS, fp32_gradients=True,
    ),
    Source(
        "NVIDIA/Megatron-LM functional tests", "functional_tests", "megatron-tests",
        "model_config.yaml of each test and argument defaults; the time of small or deterministic models is not read",
        vocab=50_257, fp32_gradients=True,
        untimed=({"hidden": r"^\d{1,3}$|^[123]\d{3}$"}, {"notes": "deterministic mode"}),
        variants=MEGATRON_TESTS,
    ),
    Source(
        "DeepSpeed ZeRO-3 in Narayanan et al. 2021", "narayanan|2104.04473", "deepspeed@2021",
        "its Table 2: ZeRO-3 without model parallelism, recompute of every layer", cells={"zero": "^3"},
        convention="full-attention", counts_recomputed=True, peak=312e12, zero=3, vocab=51_200,
        microbatch="local batch",
    ),
    Source(
        "Korthikanti et al. 2022", "korthikanti|2205.05198", EARLY_MEGATRON,
        "paper: fp16, scores stored, Adam not sharded, gradients reduced after the backward pass; SP is printed",
        convention="full-attention", peak=312e12, zero=0, vocab=51_200,
    ),
    Source(
        "Narayanan et al. 2021", "narayanan|2104.04473", EARLY_MEGATRON,
        "paper: fp16, scores stored, Adam not sharded, no SP; its TFLOP/s count one recomputed forward pass (eq. 3)",
        convention="full-attention", counts_recomputed=True, peak=312e12, zero=0, vocab=51_200,
    ),
    Source(
        "Zero Bubble", "zero.?bubble|2401.10241", EARLY_MEGATRON,
        "paper: Megatron-LM fork without fused attention; vocabulary of 32k from its SentencePiece tokenizer",
        zero=0,
    ),
    Source(
        "NVIDIA/Megatron-LM", "megatron-lm", "megatron-core@2024",
        "README table: all overlap on; one microbatch per step without pipeline (weak scaling at a fixed local batch), "
        "one sequence and one layer per chunk with it",
        convention="full-attention", microbatch="local batch", layer_per_chunk=True, vocab=131_072, fp32_gradients=True,
    ),
    Source(
        "NVIDIA-NeMo/Megatron-Bridge", "megatron-?bridge", "megatron-bridge",
        "performance recipes at tags v0.1.0rc4 to v0.6.0, by the row's container; no recompute unless listed below",
        variants=MEGATRON_BRIDGE,
    ),
    Source(
        "NVIDIA/NeMo", "nemo", "megatron-core@2024",
        "long-sequence page: FP8, one sequence per microbatch, ring attention, causal attention counted once; NeMo's "
        "recipes use the distributed optimizer (zero 1)", fp32_gradients=True,
    ),
    Source(
        "huggingface/nanotron", "nanotron|ultra-?scale", "nanotron",
        "scaling-benchmark scripts: SP with TP, no recompute, MFU over full attention and 989 TFLOP/s; 8 H100 per node "
        "and paths under Amazon's /fsx: P5 nodes; stages cut by the cost of their matmuls; memory is what the first "
        "rank's allocator reserved, in GiB under the label GB (helpers.py, create_table_log)",
        convention="full-attention", peak=989e12, machines={"dgx-h100": "p5-h100"}, stages_by_cost=True,
        memory="reserved, first rank",
    ),
    Source(
        "MooreThreads/SimuMax", "simumax", "simumax",
        "benchmark scripts: Megatron-LM 0.14, nothing overlapped, sequence 4096, all-to-all context parallelism",
        context_method="ulysses",
    ),
    Source(
        "torchtitan", "torchtitan|2410.06511", "torchtitan@2024",
        "reports: FSDP2, TP with SP, local batch printed, per-op selective recompute; async TP where it says so",
        zero=3, microbatch="local batch", variants=_TORCHTITAN,
    ),
)  # fmt: skip


# Rows that are scored apart, with the reason (another measurement of the same line contradicts them, or another
# algorithm ran).
SET_ASIDE = {
    **dict.fromkeys(
        ("ft0027", "ft0030", "ft0043"), "less memory than the weights, gradients and moments of its configuration"
    ),
    "mlm_gpt_gpt3_mcore_te_tp2_pp1_modelopt_distill_resume_dev_dgx_gb200": "distillation: a teacher runs too",
    "mbridge_26.02_DGX-H100_Qwen3-30B-A3B_16_FP8_1": "118 TFLOP/s where 26.02.01 prints 208 for the same line",
    "mbridge_25.11_DGX-H100_Qwen3-30B-A3B_16_FP8-CS_1": "121 TFLOP/s where 25.09 prints 241 for the same degrees",
    "nanotron_80.0B_4n": "2.3 times slower per GPU than its 16-node row at 66 GB: allocator thrash suspected",
    "titan_t2_2": "early ring attention: kernels at 185 instead of 285 TFLOP/s",
    "titan_t2_3": "early ring attention: kernels at 185 instead of 285 TFLOP/s",
    "titan_atp_5_0": "row-wise FP8 scaling, slower than BF16: another kernel class",
    "titan_atp_5_1": "row-wise FP8 scaling, slower than BF16: another kernel class",
    "mbridge_26.06.01_DGX-GB200_GPT-OSS-120B_64_MXFP8_1": "the source's footnote: a known regression of this container",
    "mbridge_25.09_DGX-GB200_DeepSeek-V3-671B_256_FP8_1": "token-drop routing, another algorithm",
    "mbridge_25.09_DGX-B200_DeepSeek-V3-671B_256_FP8_1": "token-drop routing, another algorithm",
    "mbridge_26.02.01_DGX-GB300_Llama3-70B_64_MXFP8_2": "VP 1 where 26.02 and 26.04 print VP 5 with the same speed",
}


def source_of(row: TableRow) -> Source:
    """The source of a row; of one that is not listed, the framework that it names, else plain PyTorch."""
    text = row.text("source")
    for source in SOURCES:
        if source.covers(row):
            return source
    stack = row.text("stack") or ("megatron-core" if "megatron" in text.lower() else "pytorch")
    reason = f"no recipe known: the defaults of {stack}"
    return Source(text, "", stack, reason, fp32_gradients=stack == "megatron-core")
