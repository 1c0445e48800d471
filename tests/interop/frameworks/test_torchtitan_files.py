"""TorchTitan's own models by flavor, and the JSON that its runs save of their configuration."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.interop.frameworks import TARGETS, framework_of, read
from shardwise.spec import presets
from shardwise.spec.clusters import cluster_from
from shardwise.spec.hardware import Cluster

TITAN = TARGETS["torchtitan"]


def linear(inputs: int, outputs: int, bias: bool = False) -> dict[str, Any]:
    return {"in_features": inputs, "out_features": outputs, "bias": bias}


def norm(width: int) -> dict[str, Any]:
    return {"normalized_shape": width, "eps": 1e-05}


def mlp(hidden: int, width: int) -> dict[str, Any]:
    return {"w1": linear(hidden, width), "w2": linear(width, hidden), "w3": linear(hidden, width)}


def saved(name: str, flavor: str, model: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """What `--debug.save_config_file` writes (torchtitan/trainer.py, August 2026), as far as it is read."""
    return {
        "model_spec": {"name": name, "flavor": flavor, "model": model},
        "dump_folder": "./outputs",
        "optimizer": {
            "param_groups": [
                {
                    "pattern": ".*",
                    "optimizer_name": "AdamW",
                    "optimizer_kwargs": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-08, "weight_decay": 0.1},
                }
            ]
        },
        "lr_scheduler": {"warmup_steps": 200, "total_steps": None, "decay_ratio": None, "decay_type": "linear"},
        "training": {
            "num_tokens_per_microbatch_per_dp_rank": 8192,
            "num_tokens_per_train_step": -1,
            "max_context_length": 8192,
            "steps": 1000,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            **sections.get("training", {}),
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": -1,
            "tensor_parallel_degree": 1,
            "enable_sequence_parallel": True,
            "spmd_backend": "spmd_types",
            "pipeline_parallel_degree": 1,
            "pipeline_parallel_schedule": "1F1B",
            "num_pp_microbatches": 1,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 1,
            **sections.get("parallelism", {}),
        },
        "activation_checkpoint": sections.get("recompute", {"preserve_rng_state": True}),
        "compile": {"enable": True, "enable_async_tensor_parallel": False},
    }


def llama(layers: int, hidden: int, heads: int, groups: int, width: int) -> dict[str, Any]:
    size = hidden // heads
    attention = {
        "n_heads": heads, "n_kv_heads": groups, "head_dim": None, "qk_norm": None, "wo": linear(hidden, hidden),
        "qkv_linear": {"head_dim": size, "n_heads": heads, "wqkv": linear(hidden, (heads + 2 * groups) * size)},
        "rope": {"theta": 500000, "scaling": "llama", "max_context_length": 131072},
    }  # fmt: skip
    layer = {"attention": attention, "feed_forward": mlp(hidden, width), "moe": None, "attention_norm": norm(hidden)}
    return {"dim": hidden, "vocab_size": 128256, "layers": [layer] * layers, "enable_weight_tying": False}


def written(tmp_path: Path, tree: dict[str, Any]) -> str:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return str(path)


def test_a_saved_run_is_the_preset_that_it_spells_out(tmp_path: Path) -> None:
    path = written(tmp_path, saved("llama3", "8B", llama(32, 4096, 32, 8, 14336)))
    assert framework_of(path) == "torchtitan"
    fields = read(path).fields
    assert fields["model"] == "llama3.1-8b"
    assert (fields["training.seq"], fields["strategy.microbatch"], fields["strategy.zero"]) == (8192, 1, 3)
    assert fields["strategy.recompute"] == "full"
    done = run("analyze", path, "--gpus", "64", "--json")
    assert done.status == 0, done.err
    assert "not priced here" not in done.err and "does not say whether matmuls are in fp8" in done.err


def test_a_saved_run_of_a_pipeline_counts_tokens(tmp_path: Path) -> None:
    tree = saved(
        "llama3", "mine", llama(16, 2048, 16, 8, 6144),
        training={"num_tokens_per_microbatch_per_dp_rank": 4096, "max_context_length": 2048,
                  "num_tokens_per_train_step": 2048 * 256},
        parallelism={"pipeline_parallel_degree": 4, "num_pp_microbatches": 8, "tensor_parallel_degree": 2,
                     "pipeline_parallel_first_stage_less_layers": 0, "pipeline_parallel_last_stage_less_layers": 0,
                     "enable_sequence_parallel": False},
        recompute={"force_recompute_mm_shapes_by_fqns": []},
    )  # fmt: skip
    fields = read(
        written(tmp_path, tree), cluster=presets.resolve("cluster", Cluster, "dgx-h100").with_devices(64)
    ).fields
    model = fields["model"]
    assert (model["name"], model["layers"], model["ffn"], model["kv_heads"]) == ("llama3-mine", 16, 6144, 8)
    assert (fields["strategy.microbatch"], fields["training.global_batch"], fields["strategy.pp"]) == (2, 256, 4)
    assert (fields["strategy.recompute"], fields["strategy.sequence_parallel"]) == ("selective", False)
    # 8 ranks share the batch: 4 accumulations of 8 microbatches of 2 sequences would be 64 of them on each.
    assert run("analyze", written(tmp_path, tree), "--gpus", "64", "--set", "strategy.zero=1").status == 0


def test_experts_and_latent_attention_are_spelled_out_too(tmp_path: Path) -> None:
    attention = {
        "n_heads": 16, "q_lora_rank": 0, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "wo": linear(2048, 2048), "rope": {"theta": 10000.0, "max_context_length": 16384},
    }  # fmt: skip
    router = {"gate": linear(2048, 64), "top_k": 6, "score_func": "softmax", "route_norm": False, "route_scale": 1.0}
    inner = {"inner_experts": {"hidden_dim": 1408}, "token_dispatcher": {}}
    moe = {"num_experts": 64, "routed_experts": inner, "router": router, "shared_experts": mlp(2048, 2816)}
    dense = {"attention": attention, "feed_forward": mlp(2048, 10944), "moe": None, "attention_norm": norm(2048)}
    sparse = {**dense, "feed_forward": None, "moe": moe}
    model = {"dim": 2048, "vocab_size": 102400, "layers": [dense, *[sparse] * 26], "mtp_layers": []}
    assert read(written(tmp_path, saved("deepseek_v3", "16B", model))).fields["model"] == "deepseek-v2-lite"
    mixed = {**model, "layers": [{**dense, "attention": None}, *[sparse] * 26]}
    line = error_line(run("analyze", written(tmp_path, saved("qwen3_5", "4B", mixed)), "--gpus", "8"))
    assert "qwen3_5 4B of TorchTitan is not known here (some of its layers have no softmax attention)" in line


def test_what_version_0_2_saves_is_its_toml_as_json(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 4096\n[parallelism]\ntensor_parallel_degree = 8'
    )
    tree = tomllib.loads(text)
    tree["parallelism"]["module_fqns_per_model_part"] = None
    assert read(written(tmp_path, tree)).fields == TITAN.read(text).fields


@pytest.mark.parametrize(
    ("name", "flavor", "expected"),
    [("llama3", "8B_flex", "llama3.1-8b"), ("llama3", "debugmodel_varlen_attn", "llama3-debugmodel"),
     ("gpt_oss", "debugmodel", "gpt-oss-debugmodel"), ("qwen3", "debugmodel_moe", "qwen3-debugmodel-moe")],
)  # fmt: skip
def test_flavors_are_known_by_name(name: str, flavor: str, expected: str) -> None:
    model = TITAN.read(f'[model]\nname = "{name}"\nflavor = "{flavor}"\n').fields["model"]
    assert (model if isinstance(model, str) else model["name"]) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[model]\nname = "llama4"\nflavor = "17bx16e"\n',
            "llama4 17bx16e of TorchTitan is not known here (models llama3",
        ),
        ('[model]\nname = "qwen3"\nflavor = "9B"\n', "those of qwen3: 0.6B, 1.7B"),
        ('[model]\nname = "flux"\nflavor = "flux-dev"\n[training]\nguidance = 1\n', "flux is a model of pictures"),
        ('[hf_transformers]\nmodel = "Qwen/Qwen3-4B"\n', "Qwen/Qwen3-4B comes from Hugging Face"),
        ("[tool]\nname = 1\n", "is not a setting of TorchTitan"),
        ("[training]\nseq_len = 4096\n", "the file names no flavor of TorchTitan (model.flavor)"),
    ],
)
def test_another_model_is_named_with_what_is_known(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text, encoding="utf-8")
    assert said in error_line(run("analyze", str(path), "--gpus", "8"))


@pytest.mark.parametrize("shards", [1, 2, -1])
@pytest.mark.parametrize("cp", [1, 2])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (4, 1), (1, 4), (2, 2)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_fsdp_tensor_and_pipeline_parallel_ranks_compute_in_fp32(
    dtype: str, tp: int, pp: int, cp: int, shards: int
) -> None:
    """``maybe_enable_amp`` of 0.2.2: FSDP has its own policy, autocast is for one device and DDP."""
    text = (
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\ndtype = "{dtype}"\nlocal_batch_size = 8\n[parallelism]\n'
        f"tensor_parallel_degree = {tp}\npipeline_parallel_degree = {pp}\ncontext_parallel_degree = {cp}\n"
        f"data_parallel_shard_degree = {shards}\n"
    )
    cluster = cluster_from("dgx-h100:1").with_devices(tp * pp * cp * max(1, shards))
    back = TARGETS["torchtitan"].read(text, None, cluster)
    job = back.job(cluster)
    alone = dtype == "float32" and cp == 1 and shards != 2 and max(tp, pp) > 1
    assert (job.training.recipe.compute == "fp32") == alone
    assert any("compute in fp32" in note for note in back.notes) == alone
    assert job.autocasts == (job.strategy.world == 1 and dtype == "float32")
    exported = TARGETS["torchtitan"].export(job.unchecked(training=replace(job.training, precision="bf16-fp32-grads")))
    missing = {lost.field: lost.why for lost in exported.missing}
    assert ("training.precision" in missing) == (cp == 1 and shards != 2 and max(tp, pp) > 1)
