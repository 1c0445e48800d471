"""Other frameworks' configurations as people write them: understood, or refused with one line that names the key."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from effort import examples
from interop.frameworks.random_jobs import drawn
from shardwise.interop.frameworks import TARGETS, framework_of, read
from shardwise.interop.frameworks.documents import without_comments
from shardwise.interop.frameworks.megatron import layout_counts, layout_text
from shardwise.interop.frameworks.megatron_model import expert_layers
from shardwise.interop.keys import unflatten
from shardwise.spec import Cluster, Model, SpecError, presets
from shardwise.spec.clusters import cluster_from

CLUSTER: Cluster = cluster_from("dgx-h100:8")  # 64 devices
LLAMA = presets.load("model", Model, "llama3-8b")
DEEPSPEED = """{
  // the batch: 4 x 4 x 64
  "train_batch_size": 1024,
  "train_micro_batch_size_per_gpu": 4,
  "gradient_accumulation_steps": 4,   # accumulation
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 500}},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": false, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
           "min_loss_scale": 1},
  "bf16": {"enabled": true},
  /* ZeRO-3, optimizer on the
     host */
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true},
    "offload_param": {"device": "none"},
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": 5e7,
  },
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
  "steps_per_print": 10, "wall_clock_breakdown": false
}"""


def deepspeed(text: str | dict[str, Any], cluster: Cluster | None = CLUSTER, **given: Any) -> Any:
    text = text if isinstance(text, str) else json.dumps(text)
    return TARGETS["deepspeed"].read(text, None, cluster, given)


def refused(name: str, text: str, cluster: Cluster | None = CLUSTER) -> str:
    with pytest.raises(SpecError) as error:
        TARGETS[name].read(text, None, cluster)
    assert "\n" not in str(error.value)
    return str(error.value)


# -- DeepSpeed -----------------------------------------------------------------------------------------------


def test_deepspeed_configuration_with_comments() -> None:
    back = deepspeed(DEEPSPEED)
    job = replace(back, fields={**back.fields, "training.seq": 4096}).job(CLUSTER, LLAMA)
    assert job.training.global_batch == 1024
    assert job.strategy.microbatch == 4
    assert job.microbatches == 4
    assert job.strategy.zero == 3
    assert job.strategy.overlap.dp
    assert job.training.precision == "bf16"
    assert job.training.optimizer == "adamw"
    assert job.strategy.recompute == "full"
    assert (job.strategy.offload.optimizer, job.strategy.offload.weights) == (1, 0)
    assert job.training.seq == 4096


def test_deepspeed_settings_without_a_field_are_reported() -> None:
    unused = " ".join(deepspeed(DEEPSPEED).unused)
    for key in ("reduce_bucket_size", "stage3_prefetch_bucket_size", "contiguous_gradients"):
        assert key in unused
    for carried in ("optimizer.params.lr", "scheduler", "gradient_clipping", "fp16.loss_scale"):
        assert carried not in unused
    for harmless in ("steps_per_print", "wall_clock_breakdown", "pin_memory", "train_batch_size"):
        assert harmless not in unused


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("formats", "masters", "optimizer"), [
    ({"bf16": {"enabled": True}}, "fp32", "adamw"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "16-bit", "adamw"),
    ({"bfloat16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
     "16-bit", "adamw-bf16-moments"),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "16-bit", "adamw"),
])  # fmt: skip
def test_deepspeed_formats_of_masters_and_moments(
    stage: int, formats: dict[str, Any], masters: str, optimizer: str
) -> None:
    zero = {"stage": stage, "sub_group_size": 1e6}
    config = {"train_batch_size": 64, "optimizer": {"type": "AdamW"}, "zero_optimization": zero, **formats}
    back = deepspeed(config)
    job = replace(back, fields={**back.fields, "training.seq": 512}).job(CLUSTER, LLAMA)
    assert (job.stack.masters, job.training.optimizer) == (masters, optimizer)
    assert job.stack.update_elements == (10**6 if stage == 3 else 10**9)
    assert ("sub_group_size" in " ".join(back.unused)) == (stage != 3)
    assert "bf16" not in " ".join(back.unused)
    exported = TARGETS["deepspeed"].export(job)
    (text,) = exported.files.values()
    again = deepspeed(text)
    again = replace(again, fields={**again.fields, "training.seq": 512}).job(CLUSTER, LLAMA)
    assert (again.stack, again.training, again.strategy) == (job.stack, job.training, job.strategy)
    assert "training.optimizer" not in [lost.field for lost in exported.lost]


def test_comments_inside_text_stay() -> None:
    assert json.loads(without_comments('{"a": "http://x # y /* z */", "b": [1, 2,], } // end')) == {
        "a": "http://x # y /* z */",
        "b": [1, 2],
    }


def test_deepspeed_contradictory_batch_names_all_three() -> None:
    line = refused(
        "deepspeed",
        '{"train_batch_size": 1000, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}',
    )
    for part in (
        "train_batch_size",
        "1000",
        "train_micro_batch_size_per_gpu 4",
        "gradient_accumulation_steps 4",
        "64",
        "1024",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("given", "batch", "micro"),
    [
        ({"train_batch_size": 256}, 256, 4),
        ({"train_micro_batch_size_per_gpu": 2}, 128, 2),
        ({"train_batch_size": 512, "gradient_accumulation_steps": 2}, 512, 4),
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, 384, 2),
    ],
)
def test_deepspeed_fills_in_the_batch_as_deepspeed_does(given: dict[str, int], batch: int, micro: int) -> None:
    fields = deepspeed(given).fields
    assert (fields["training.global_batch"], fields["strategy.microbatch"]) == (batch, micro)


def test_deepspeed_pipeline_degree_from_beside_the_file() -> None:
    back = deepspeed(
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4},
        **{"strategy.pp": 4},
    )
    assert back.fields["strategy.pp"] == 4


def test_deepspeed_auto_is_left_to_the_user() -> None:
    back = deepspeed({"train_batch_size": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}})
    assert "training.global_batch" not in back.fields
    assert "training.precision" not in back.fields
    assert any("--precision" in note for note in back.notes)
    assert any("--global-batch" in note for note in back.notes)


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"train_batchsize": 8}, ("train_batchsize", "did you mean train_batch_size")),
        ({"zero_optimization": {"stages": 1}}, ("zero_optimization.stages", "zero_optimization.stage")),
        ({"zero_optimization": {"stage": 4}}, ("zero_optimization.stage", "4", "0, 1, 2 or 3")),
        ({"zero_optimization": {"stage": "two"}}, ("zero_optimization.stage", "two", "number")),
        ({"zero_optimization": 3}, ("zero_optimization", "3")),
        ({"train_batch_size": True}, ("train_batch_size", "true")),
        ({"train_batch_size": 0}, ("train_batch_size", "0")),
        ({"train_batch_size": 2.5}, ("train_batch_size", "2.5")),
        ({"fp16": {"enabled": "yes"}}, ("fp16.enabled", "yes")),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
        ({"fp16": {"loss_scale": "big"}}, ("fp16.loss_scale", "big")),
        ({"zero_optimization": {"offload_param": {"device": "disk"}}}, ("offload_param.device", "disk", "nvme")),
        ({"zero_optimization": {"reduce_bucket_size": []}}, ("reduce_bucket_size",)),
        ({"zero_optimization": {"stage": 3, "sub_group_size": -1}}, ("sub_group_size", "-1")),
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, ("weights_and_grads", "ZeRO")),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ("optimizer_states", "weights_and_grads")),
    ],
)
def test_deepspeed_mistakes_name_the_key(config: dict[str, Any], parts: tuple[str, ...]) -> None:
    line = refused("deepspeed", json.dumps(config))
    assert all(part in line for part in parts), line


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("text", ["{", "[1, 2", '"text"', "3", "\x00", "a: [", "= 3", "'"])
def test_malformed_text_is_one_line(name: str, text: str) -> None:
    assert refused(name, text)


# -- Megatron-LM ---------------------------------------------------------------------------------------------

COMMAND = r"""
torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py \
  --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 \
  --group-query-attention --num-query-groups 8 --seq-length 8192 --max-position-embeddings 8192 \
  --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear \
  --untie-embeddings-and-output-weights --vocab-size 128256 \
  --tensor-model-parallel-size=4 --pipeline-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer \
  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size 256 --train-iters 1000 \
  --bf16 --overlap-grad-reduce --recompute-activations --attention-dropout 0 --hidden-dropout 0 \
  --lr 3e-4 --clip-grad 1.0 --data-path 'my data' --split 99,1,0 --save /ckpt --save-interval 500
"""


def test_megatron_command_line() -> None:
    back = TARGETS["megatron"].read(COMMAND, None, CLUSTER)
    job = back.job(CLUSTER)
    llama = LLAMA
    assert (job.model.layers, job.model.hidden, job.model.kv_heads) == (llama.layers, llama.hidden, llama.kv_heads)
    strategy = job.strategy
    assert (strategy.tp, strategy.pp, strategy.data_parallel, strategy.zero) == (4, 4, 4, 1)
    assert (strategy.schedule, strategy.interleave) == ("interleaved", 2)
    assert strategy.recompute == "none"  # a fused attention keeps no scores that core_attn could make again
    assert "--recompute-modules core_attn recomputes nothing here: not priced" in back.notes
    assert job.stack.name == "megatron-core"
    assert job.training.precision == "bf16-fp32-grads"
    assert job.training.tokens == 1000 * 256 * 8192
    assert back.unused == ()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("--tensor-model-paralel-size 8", ("--tensor-model-paralel-size", "did you mean --tensor-model-parallel-size")),
        ("--swiglu yes", ("--swiglu", "yes")),
        ("--micro-batch-size", ("--micro-batch-size", "no value")),
        ("--micro-batch-size 1 2", ("--micro-batch-size",)),
        ("--micro-batch-size one", ("--micro-batch-size", "one")),
        ("--num-layers 8", ("--hidden-size", "missing")),
        ("--bf16 --fp16", ("--fp16", "--bf16")),
        ("--data-path 'x", ("quot",)),
        ("train", ("train",)),
    ],
)
def test_megatron_mistakes_name_the_option(text: str, parts: tuple[str, ...]) -> None:
    line = refused("megatron", text)
    assert all(part in line for part in parts), line


def test_pipeline_layouts() -> None:
    assert layout_counts("Et*3|t*4|(tt|)*2t*3L") == (3, 4, 2, 2, 3)
    assert layout_counts("E|(t|)*3,m|m||L") == (0, 1, 1, 1, 0, 0, 0, 0)
    for counts in ((1, 2), (3, 4, 4, 3), (10, 11)):
        assert layout_counts(layout_text(counts, mtp_layers=1)) == counts
    with pytest.raises(SpecError):
        layout_counts("import os")
    with pytest.raises(SpecError):
        layout_counts("((((t*9999)*9999)*9999)*9999)")


def test_expert_layer_patterns() -> None:
    assert expert_layers("1", 8) == (0, 1)
    assert expert_layers("[0]*3+[1]*58", 61) == (3, 1)
    assert expert_layers("([0]*1+[1]*1)*12", 24) == (0, 2)
    for bad in ("[1]*7", "[1]*8**9", "__import__('os')", "([1]*99999)*99999", "[2]*8", "[1,0,0,1,1,0,1,0]", "(" * 300):
        with pytest.raises(SpecError):
            expert_layers(bad, 8)


# -- the others ----------------------------------------------------------------------------------------------


def test_torchtitan_defaults() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n[parallelism]\n'
    back = TARGETS["torchtitan"].read(text + "tensor_parallel_degree = 8", None, CLUSTER)
    job = back.job(CLUSTER)
    assert job.model.name == "llama3.1-8b"  # whose rotary positions it stretches
    assert (job.strategy.tp, job.strategy.data_parallel, job.strategy.zero) == (8, 8, 3)
    assert job.training.global_batch == 16
    assert job.training.precision == "bf16-fp32-grads"
    assert job.strategy.recompute == "full"  # its default: every second layer
    assert "did you mean" in refused("torchtitan", "[parallelism]\ntensor_paralel_degree = 2")
    assert "local_batch_size" in refused("torchtitan", "[training]\nglobal_batch_size = 100\nlocal_batch_size = 8")


def test_accelerate_modes() -> None:
    text = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: {}\n"
    for word, zero in (("FULL_SHARD", 3), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 0)):
        assert TARGETS["accelerate"].read(text.format(word)).fields["strategy.zero"] == zero
    hybrid = TARGETS["accelerate"].read(text.format("HYBRID_SHARD"), None, CLUSTER)
    assert hybrid.fields["strategy.shard_group"] == 8
    assert "distributed_type" in refused("accelerate", "mixed_precision: bf16")
    assert "num_processes" in refused("accelerate", "distributed_type: MULTI_GPU\nnum_processes: 8")


def test_a_framework_is_recognised_by_its_file(tmp_path: Path) -> None:
    for name, one in TARGETS.items():
        (job,) = drawn(name, seed=7, number=1)
        for file, text in one.export(job).files.items():
            path = tmp_path / file
            path.write_text(text, encoding="utf-8")
            assert framework_of(path) == name
            assert read(path, model=job.model).fields
    others = {
        "job.yaml": "model: llama3-8b\ncluster: dgx-h100\n",
        "config.json": '{"model_type": "llama"}',
        "x.bin": "",
        "bad.json": "{",
    }
    for file, text in others.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
        assert framework_of(tmp_path / file) is None
    (tmp_path / "broken.json").write_text('{"zero_optimization": {"stage": 1', encoding="utf-8")
    with pytest.raises(SpecError, match=r"broken\.json.*malformed JSON"):
        read(tmp_path / "broken.json")
    with pytest.raises(SpecError, match="is not there"):
        read(tmp_path / "none.json", "deepspeed")
    with pytest.raises(SpecError, match="looks like none of"):
        read(tmp_path / "job.yaml")


WRONG: tuple[Any, ...] = (None, True, -1, 0, 10**30, 0.5, float("inf"), "", "text", "auto", [], [1], {}, {"a": 1})


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "megatron"])
def test_any_wrong_value_is_refused_or_read(name: str) -> None:
    """A setting with a value of any kind gives fields, a job or one line, never another error."""
    random, one = Random(11), TARGETS[name]
    for job in drawn(name, seed=12, number=examples(80)):
        settings = one.settings(job)
        for _ in range(8):
            broken = {**settings, random.choice(sorted(settings)): random.choice(WRONG)}
            try:
                text = one.format.render(broken, one.names)
                one.read(text, job.model, job.cluster).job(job.cluster, job.model)
            except SpecError as error:
                assert "\n" not in str(error)
        assert unflatten(settings)


def test_any_wrong_megatron_value_is_refused_or_read() -> None:
    random, one = Random(11), TARGETS["megatron"]
    for job in drawn("megatron", seed=12, number=examples(80)):
        settings = one.settings(job)
        for _ in range(8):
            broken = {
                **settings,
                random.choice(sorted(settings)): random.choice(("", "-1", "0", "x", "1e99", ["1", "2"])),
            }
            try:
                one.read(one.format.render(broken, one.names), None, job.cluster).job(job.cluster)
            except SpecError as error:
                assert "\n" not in str(error)
