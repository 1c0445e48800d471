"""What a source leaves out: which recipe a row gets, by source, device and container, and what it fills in."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from shardwise.accuracy import vocabulary
from shardwise.accuracy.runs import run_from_row
from shardwise.accuracy.sources import SET_ASIDE, SOURCES, source_of
from shardwise.accuracy.table import TableRow, Variant
from shardwise.spec.errors import SpecError
from shardwise.spec.stack import stack_from

with (Path(__file__).parents[2] / "validation" / "training_runs.csv").open(newline="") as file:
    ROWS = {row["row_id"]: row for row in csv.DictReader(file)}
LLAMA = {
    "row_id": "one", "source": "AMD-AGI/Primus", "model": "Llama3.1-8B", "layers": "32", "hidden": "4096",
    "heads": "32", "kv_heads": "8", "ffn": "14336", "gated_mlp": "1", "vocab": "128256", "seq": "8192", "gpu": "MI325X",
    "gpus": "64", "gpus_per_node": "8", "tp": "1", "pp": "1", "dp": "64", "mbs": "2", "precision": "FP8",
    "rep_tok_s_gpu": "9000",
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "gpu", "row_id", "stack"),
    [
        ("mlcommons/training_results_v4.0", "H100-SXM-80GB", "", "nemo@24.04"),
        ("mlcommons/training_results_v5.1", "GB300-NVL72", "", "nemo@24.04"),
        ("mlcommons/training_results_v5.1", "MI355X", "", "nemo@24.04"),
        ("mlcommons/training_results_v4.0", "TPU-v5p", "", "maxtext@2023.12"),
        ("mlcommons/training_results_v3.1", "Gaudi2", "", "habana-deepspeed"),
        ("NVIDIA/dgxc-benchmarking (DGX Cloud)", "H100-SXM-80GB", "dgxc_25.02_GPT3", "nemo@24.04"),
        ("NVIDIA/dgxc-benchmarking (DGX Cloud)", "H100-SXM-80GB", "dgxc_24.11_GPT3_paxml", "paxml"),
        ("NVIDIA/Megatron-LM tests/functional_tests", "A100-SXM-80GB", "", "megatron-tests"),
        ("NVIDIA/Megatron-LM README", "H100-SXM-80GB", "", "megatron-core@2024"),
        ("someone's blog, Megatron", "A100-SXM-80GB", "", "megatron-core"),
        ("someone's blog", "A100-SXM-80GB", "", "pytorch"),
    ],
)
def test_a_source_is_known_by_more_than_its_name(source: str, gpu: str, row_id: str, stack: str) -> None:
    assert source_of(TableRow({"source": source, "gpu": gpu, "row_id": row_id})).stack == stack


def test_every_recipe_describes_a_stack() -> None:
    for source in SOURCES:
        stack = stack_from(source.stack)
        for variant in source.variants:
            assert variant.reason and variant.on(stack)


@pytest.mark.parametrize(
    ("container", "applies"), [("25.11", False), ("26.02", True), ("26.04", True), ("26.04.01", False), ("", False)]
)
def test_a_variant_holds_for_some_containers(container: str, applies: bool) -> None:
    variant = Variant("", "", {"gpu": "B200"}, since="26.02", until="26.04")
    assert variant.applies(TableRow({"gpu": "B200", "locator": f"{container} container"})) == applies


def test_a_row_that_prints_no_batch_gets_that_of_its_recipe() -> None:
    job = run_from_row(TableRow(LLAMA)).job
    assert (job.sequences, job.microbatches) == (8 * 2 * 64, 8)
    assert run_from_row(TableRow({**LLAMA, "gbs": "128"})).job.sequences == 128
    with pytest.raises(SpecError, match="gbs"):
        run_from_row(TableRow({**LLAMA, "source": "someone's blog"}))


def test_rows_set_aside_are_in_the_table() -> None:
    """Rows of fine-tuning runs are in no table of this repository."""
    others = {name for name in SET_ASIDE if name.startswith("ft")}
    for name in ("training_runs_2", "memory_runs"):
        with (Path(__file__).parents[2] / "validation" / f"{name}.csv").open(newline="") as file:
            others |= {row["row_id"] for row in csv.DictReader(file)}
    assert set(SET_ASIDE) <= set(ROWS) | others


@pytest.mark.parametrize(
    ("name", "chips", "tori", "shape", "slices"),
    [
        ("tpu-v5p", 512, None, (8, 8, 8), 1),
        ("tpu-v5p", 1536, None, (8, 12, 16), 1),
        ("tpu-v5p", 6144, None, (16, 16, 24), 1),
        ("tpu-v5p", 256, 2, (4, 4, 8), 2),
        ("tpu-v4", 384, 2, (4, 4, 12), 2),
        ("tpu-v5e", 256, None, (16, 16), 1),
        ("tpu-v5e", 8192, None, (16, 16), 32),
        ("tpu-v6e", 3072, None, (16, 16), 12),
    ],
)
def test_chips_are_cut_into_compact_slices(
    name: str, chips: int, tori: int | None, shape: tuple[int, ...], slices: int
) -> None:
    cluster = vocabulary.machine(name, chips, tori=tori)
    assert (cluster.levels[0].shape, cluster.levels[1].width, cluster.devices) == (shape, slices, chips)


def test_chips_that_make_no_slice_are_refused() -> None:
    with pytest.raises(SpecError, match="66 chips"):
        vocabulary.machine("tpu-v5p", 66)


def test_slices_and_groups_by_their_words() -> None:
    assert vocabulary.slices("configs/v5p/README.md (2x v5p-1024)") == 2
    assert vocabulary.slices("Table 2") is None
    assert vocabulary.shard_group("FSDP (ZeRO-3) group 16, 8-way replicated") == 16
    assert vocabulary.shard_group("FSDP (ZeRO-3), group size not printed") is None


def test_a_recipe_cuts_the_stages_where_it_says() -> None:
    bridge = ROWS["mbridge_26.04_DGX-GB200_Qwen3-30B-A3B_8_MXFP8_1"]
    cells = {"model": "DeepSeek-V3", "layers": "61", "n_experts": "256", "gpus": "256", "pp": "4", "vpp": "4",
             "ep": "64", "dp": "64", "mbs": "1", "gbs": "4096"}  # fmt: skip
    assert run_from_row(TableRow({**bridge, **cells})).job.strategy.stage_layers == (*[4] * 15, 1)
    two = {**cells, "pp": "2", "vpp": "1", "dp": "128"}
    assert run_from_row(TableRow({**bridge, **two})).job.strategy.stage_layers == "balanced"
