"""Jobs to other frameworks and back: what a framework can say returns, what it cannot is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from effort import examples
from interop.frameworks.random_jobs import drawn
from shardwise.interop.frameworks import TARGETS, can_run, export, lacking, target
from shardwise.interop.frameworks.documents import recorded
from shardwise.interop.frameworks.job_fields import effective_fields, shape_of
from shardwise.spec import Job, SpecError

NUMBER = examples(200)


def there_and_back(job: Job, name: str, extra: dict[str, Any]) -> Job:
    """The job that its exported text and the fields in ``extra`` make."""
    one = TARGETS[name]
    (text,) = one.export(job).files.values()
    given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
    back = one.read(text, job.model, job.cluster, given)
    fields = {**back.fields, **extra}
    if job.strategy.schedule == "interleaved" and job.strategy.pp == 1:
        fields.pop("strategy.interleave", None)
    return replace(back, fields=fields).job(job.cluster, None if one.carries_model else job.model)


@pytest.mark.parametrize("name", TARGETS)
def test_what_a_framework_can_say_returns(name: str) -> None:
    for job in drawn(name, seed=1, number=NUMBER):
        exported = export(job, name)
        assert exported.missing == (), (job.to_yaml(), exported.missing)
        back = there_and_back(job, name, {one.field: one.value for one in exported.elsewhere})
        expected, got = effective_fields(job), effective_fields(back)
        if job.training.tokens is None:
            expected.pop("training.tokens"), got.pop("training.tokens")
        assert got == expected
        if TARGETS[name].carries_model:
            assert shape_of(back.model) == shape_of(job.model)


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_dropped_silently(name: str) -> None:
    """Of any job, the exported text and the list of losses together say all of it."""
    differing = 0
    for job in drawn(None, seed=2, number=NUMBER):
        exported = export(job, name)
        one = TARGETS[name]
        (text,) = exported.files.values()
        given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
        fields = dict(one.read(text, job.model, None, given).fields)
        fields.update({loss.field: loss.value for loss in exported.lost})
        kept = {path: value for path, value in fields.items() if not path.startswith("model")}
        whole = Job.from_dict({**nested(kept), "model": job.model, "cluster": job.cluster})
        expected, got = effective_fields(job), effective_fields(whole)
        if job.training.tokens is None:
            expected.pop("training.tokens"), got.pop("training.tokens")
        assert got == expected
        fields = (*expected, *shape_of(job.model))
        for loss in exported.lost:
            assert loss.why and any(one == loss.field or one.startswith(f"{loss.field}.") for one in fields)
        differing += bool(exported.missing)
    assert differing > NUMBER / 2


def nested(fields: dict[str, Any]) -> dict[str, Any]:
    from shardwise.interop.frameworks.target import Imported

    tree = Imported("", fields).nested()
    strategy = tree["strategy"]
    if not strategy.get("zero"):
        strategy.pop("shard_group", None)
    if strategy.get("schedule", "1f1b") != "interleaved":
        strategy.pop("interleave", None)
    return tree


@pytest.mark.parametrize("name", TARGETS)
def test_only_recorded_options_are_written(name: str) -> None:
    names = recorded(name)
    assert names.version
    assert names.source
    for job in drawn(None, seed=3, number=NUMBER):
        for key in TARGETS[name].settings(job):
            assert key in names.exact or key.startswith(names.open_sections), key


def test_reading_uses_every_setting_that_writing_makes() -> None:
    for name, one in TARGETS.items():
        for job in drawn(name, seed=4, number=50):
            (text,) = one.export(job).files.values()
            unused = one.read(text, job.model, job.cluster, {"strategy.pp": job.strategy.pp}).unused
            assert unused == ()


def test_unknown_framework_is_named_with_the_nearest() -> None:
    with pytest.raises(SpecError, match="did you mean deepspeed"):
        target("deepsped")
    with pytest.raises(SpecError, match="megatron"):
        target("jax")


# -- what the frameworks are known to be able to do ----------------------------------------------------------

BASE = {"model": "llama3-70b", "cluster": "dgx-h100:64", "training": {"global_batch": 1024, "seq": 8192}}


def job_with(**strategy: Any) -> Job:
    return Job.from_dict({**BASE, "strategy": strategy})


def lacks(name: str, job: Job) -> set[str]:
    return {loss.field for loss in can_run(job, name)}


def test_who_can_run_a_three_dimensional_job() -> None:
    job = job_with(tp=8, pp=4, zero=1)
    assert can_run(job, "megatron") == []
    assert lacks("nanotron", job) == {"strategy.stage_layers"}  # it cuts by cost
    assert can_run(job, "colossalai") == []
    assert lacks("deepspeed", job) == {"strategy.sequence_parallel"}
    stretched = "model.numerics.rope_scaling"  # its flavors are of Llama 3.1
    assert lacks("torchtitan", job) == {"strategy.zero", "training.precision", stretched}
    assert lacks("accelerate", job) == {"strategy.tp", "strategy.pp", "strategy.overlap.dp"}


def test_what_follows_from_a_lack_is_not_repeated() -> None:
    job = Job.from_dict({**BASE, "model": "deepseek-v3", "strategy": {"pp": 8, "stage_layers": "balanced", "ep": 8}})
    exported = {loss.field for loss in export(job, "accelerate").missing}
    assert {"strategy.pp", "strategy.stage_layers"} <= exported
    assert "strategy.stage_layers" not in lacks("accelerate", job)
    (latent,) = (loss for loss in can_run(job, "nanotron") if loss.field == "model.mla")
    assert latent.value == ["kv_rank", "nope_dim", "rope_dim", "value_dim", "q_rank"]


def test_the_pipeline_engine_of_deepspeed_refuses_zero_2() -> None:
    losses = can_run(job_with(pp=4, zero=2), "deepspeed")
    assert any(loss.field == "strategy.zero" and "refuses ZeRO-2" in loss.why for loss in losses)


def test_fully_sharded_job() -> None:
    job = job_with(zero=3)
    job = replace(job, training=replace(job.training, precision="bf16-fp32-grads"))
    assert lacks("torchtitan", job) == {"model.numerics.rope_scaling"}
    assert lacking(job, "torchtitan") == []  # it runs the layout
    assert can_run(job, "accelerate") == []
    assert lacks("nanotron", job) == {"strategy.zero"}
    assert lacks("colossalai", job) == {"training.precision"}  # by GeminiPlugin
    assert "strategy.zero" in lacks("colossalai", job_with(zero=3, pp=2))


@pytest.mark.parametrize(
    ("schedule", "runners"),
    [
        ("zbv", {"torchtitan", "colossalai"}),
        ("dualpipev", {"torchtitan"}),
        ("gpipe", {"torchtitan", "nanotron"}),
        ("zb-h1", set()),
        ("1f1b", {"deepspeed", "megatron", "torchtitan", "nanotron", "colossalai"}),
    ],
)
def test_who_runs_a_schedule(schedule: str, runners: set[str]) -> None:
    job = job_with(pp=4, schedule=schedule)
    assert {name for name in TARGETS if not lacks(name, job) & {"strategy.pp", "strategy.schedule"}} == runners


def test_strict_names_all_that_is_missing() -> None:
    exported = export(job_with(tp=8, pp=4, zero=3, schedule="zb-h1"), "nanotron")
    with pytest.raises(SpecError) as error:
        exported.strict()
    assert "strategy.zero = 3" in str(error.value)
    assert "strategy.schedule = zb-h1" in str(error.value)
    assert export(job_with(tp=8), "megatron").strict().missing == ()


# -- what other people's code makes of a file ---------------------------------------------------------------


def options(job: Job, name: str = "megatron") -> str:
    (text,) = export(job, name).files.values()
    return text


def model_job(model: str, **strategy: Any) -> Job:
    return Job.from_dict({**BASE, "model": model, "strategy": strategy})


def test_megatron_norms_latent_features_only_if_told() -> None:
    """Without --qk-layernorm its latent norms are identities (``gpt_layer_specs.py``)."""
    text = options(model_job("deepseek-v3"))
    assert "--qk-layernorm" in text
    assert not any(one.field == "model.qk_norm" for one in export(model_job("deepseek-v3"), "megatron").lost)
    back = TARGETS["megatron"].read(text.replace("--qk-layernorm\n", ""))
    assert any("latent features are not normed" in note for note in back.notes)


def test_a_megatron_window_leaves_out_the_token_itself() -> None:
    """``get_sliding_window_causal_mask``: W,0 sees the token and W before it."""
    text = options(model_job("mistral-7b"))
    assert "--window-size 4095,0" in text
    assert TARGETS["megatron"].read(text).fields["model.sliding_window"] == 4096


def test_a_router_bias_that_megatron_does_not_have_is_not_written() -> None:
    exported = export(model_job("gpt-oss-20b"), "megatron")
    (text,) = exported.files.values()
    lost = {one.field for one in exported.missing}
    assert "--moe-router-enable-expert-bias" not in text and "--moe-router-bias-update-rate" not in text
    assert "--rotary-base 150000" in text
    assert {"model.moe.router_logit_bias", "model.attention_sinks", "model.numerics.rope_scaling"} <= lost


def test_what_megatron_fixes_of_yarn_is_said() -> None:
    lost = {one.field: one.value for one in export(model_job("kimi-k2"), "megatron").missing}
    assert lost == {"model.numerics.rope_scaling.beta_fast": 1.0}


def test_moments_in_16_bits_have_options_in_megatron() -> None:
    for zero, written in ((1, True), (0, False)):
        job = Job.from_dict(
            {**BASE, "training": {**BASE["training"], "optimizer": "adamw-bf16-moments"}, "strategy": {"zero": zero}}
        )
        assert ("--exp-avg-dtype bf16" in options(job)) is written
        assert any(one.field == "training.optimizer" for one in export(job, "megatron").missing) is not written


def test_autotp_counts_a_sequence_once_for_each_of_its_ranks() -> None:
    """DeepSpeed compares train_batch_size with the whole world unless a pipeline knows better."""
    job = job_with(tp=2)
    text = options(job, "deepspeed")
    assert f'"train_batch_size": {2 * job.sequences}' in text
    back = TARGETS["deepspeed"].read(text, job.model, job.cluster)
    assert back.fields["training.global_batch"] == job.sequences
    with pytest.raises(SpecError, match="train_batch_size"):
        TARGETS["deepspeed"].read(text.replace(str(2 * job.sequences), "7", 1), job.model, job.cluster)


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "mxfp8", "nvfp4"])
def test_deepspeed_never_trains_in_fp32_instead(precision: str) -> None:
    job = Job.from_dict({**BASE, "training": {**BASE["training"], "precision": precision}})
    assert '"bf16"' in options(job, "deepspeed")
    assert any(one.field == "training.precision" for one in export(job, "deepspeed").missing)


@pytest.mark.parametrize("schedule", ["dualpipev", "v-half", "zb-h2", "interleaved"])
def test_another_schedule_leaves_a_file_that_starts(schedule: str) -> None:
    """1f1b, which frameworks fall back to, takes one stage per rank."""
    job = job_with(pp=4, schedule=schedule, **({"interleave": 2} if schedule == "interleaved" else {}))
    assert "pp_engine: 1f1b" in options(job, "nanotron")  # not all forward passes first
    if schedule != "interleaved":
        colossal = options(job, "colossalai")
        assert '"pp_style": "1f1b"' in colossal and '"num_model_chunks": 1' in colossal
    if schedule in ("v-half", "zb-h2"):
        titan = options(job, "torchtitan")
        assert 'pipeline_parallel_schedule = "1F1B"' in titan
        assert f"pipeline_parallel_layers_per_stage = {job.model.layers // 4}" in titan


def test_tensor_parallelism_alone_is_beyond_accelerates_file() -> None:
    alone = Job.from_dict({**BASE, "cluster": "dgx-h100:1", "strategy": {"tp": 8}})
    assert "strategy.tp" in lacks("accelerate", alone)
    text = options(job_with(tp=8), "accelerate")
    assert "dp_replicate_size: 1" in text  # copies that shard nothing are rejected beside tensor parallelism
    assert "strategy.zero" in lacks("accelerate", job_with(tp=8))
