"""Names of settings: none of a framework's own is denied; what is not priced is said to be so."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from interop.frameworks.random_jobs import drawn
from shardwise.interop.frameworks import TARGETS
from shardwise.interop.frameworks.target import Target
from shardwise.interop.keys import unflatten
from shardwise.spec import SpecError
from shardwise.spec.files import dump_yaml

# Of lists that were not complete: names that were denied to people whose files had them.
ONCE_DENIED = {
    "megatron": ("--hybrid-layer-pattern", "--moe-latent-size", "--lion-beta1", "--mla-down-proj-fusion",
                 "--yarn-beta-fast", "--muon-coefficient-type", "--rl-generation-lag", "--zero-stage",
                 "--disable-fp8-wgrad"),
    "nanotron": ("metrics_logging.log_level", "metrics_logging.log_detail_interval",
                 "model.model_config.moe_config.moe_intermediate_size"),
    "colossalai": ("arguments.placement_policy", "arguments.shard_param_frac", "arguments.offload_optim_frac",
                   "arguments.stage", "arguments.sharding_strategy", "arguments.master_weights"),
    "deepspeed": ("zero_optimization.offload_param.nvme_path", "aio.block_size", "aio.queue_depth"),
    "torchtitan": ("training.mixed_precision_reduce",),
    "accelerate": ("deepspeed_config.offload_param_nvme_path",),
}  # fmt: skip


def file_with(one: Target, name: str, value: Any) -> str:
    if name.startswith("--"):
        return name if name in one.names.switches else f"{name} {value}"
    if ".json" in one.format.suffixes[0]:
        return json.dumps(unflatten({name: value}))
    if ".toml" in one.format.suffixes[0]:
        return one.format.render({name: value}, one.names)
    return dump_yaml(unflatten({name: value}))


def answer(one: Target, name: str, value: Any) -> str:
    """What is said of a file with this setting alone: an error, or the settings that are not priced."""
    try:
        return "; ".join(one.read(file_with(one, name, value)).not_priced)
    except SpecError as error:
        assert "\n" not in str(error)
        return str(error)


@pytest.mark.parametrize("framework", TARGETS)
def test_no_name_of_the_list_is_denied(framework: str) -> None:
    one = TARGETS[framework]
    assert set(ONCE_DENIED[framework]) <= {name for name in ONCE_DENIED[framework] if name in one.names}
    names = [*one.names.exact, *(f"{section}anything" for section in one.names.open_sections)]
    assert [name for name in (*names, *ONCE_DENIED[framework]) if "is not a setting of" in answer(one, name, 1)] == []


@pytest.mark.parametrize("framework", TARGETS)
def test_another_name_is_denied_with_the_version_and_the_nearest(framework: str) -> None:
    one = TARGETS[framework]
    for name in sorted(one.names.exact)[::40]:
        if (wrong := name + "x") in one.names:
            continue
        said = answer(one, wrong, 1)
        assert f"is not a setting of {one.names.version}" in said and "did you mean" in said


def test_a_known_setting_without_a_price_is_named() -> None:
    assert (
        answer(TARGETS["megatron"], "--lion-beta1", 0.9)
        == "--lion-beta1 = '0.9' is known to Megatron-LM, not priced here"
    )


@pytest.mark.parametrize("framework", ["deepspeed", "accelerate"])
def test_the_folder_on_a_disk_is_written_and_read_again(framework: str) -> None:
    one, moved = TARGETS[framework], 0
    for job in drawn(framework, seed=9, number=60):
        offload = replace(job.strategy.offload, target="nvme", optimizer=1.0, gradients=1.0, folder="/nvme")
        job = job.unchecked(strategy=job.strategy.unchecked(zero=3, pp=1, offload=offload))
        assert "strategy.offload.folder" not in {lost.field for lost in one.export(job).lost}
        moved += "/nvme" in one.text(job)
    assert moved > 10


def test_zero_3_is_written_for_the_plugin_that_has_it() -> None:
    one, seen = TARGETS["colossalai"], 0
    for job in drawn("colossalai", seed=3, number=60):
        job = job.unchecked(strategy=job.strategy.unchecked(zero=3, pp=1, cp=1, ep=1, expert_tp=None))
        if job.strategy.sharding_group == 1:
            continue
        seen += 1
        written = json.loads(one.text(job))
        assert written["plugin"] == "GeminiPlugin" and "zero_stage" not in written["arguments"]
        assert "strategy.zero" not in {lost.field for lost in one.export(job).missing}
    assert seen > 10
