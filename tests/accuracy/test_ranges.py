"""Ranges over what a source does not print."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.accuracy.ranges import FIELDS, predicted_range
from shardwise.accuracy.runs import PublishedRun, read_runs, run_from_row
from shardwise.accuracy.table import TableRow
from shardwise.cost.memory.device import peak_memory
from shardwise.cost.step.prediction import predict

RUNS = {run.row_id: run for run in read_runs(Path(__file__).parents[2] / "validation" / "training_runs.csv")}
H100_70B = "mbridge_26.04_DGX-H100_Llama3-70B_64_FP8_1"


def assuming(row_id: str, fields: str, **cells: str) -> PublishedRun:
    return run_from_row(TableRow({**RUNS[row_id].row.cells, "assumed_fields": fields, **cells}))


def test_fields_are_named_in_many_ways() -> None:
    run = assuming("kor22_t5_22B_full", "seq where the table prints none,sp; recompute (recipe, H100 only) ,")
    assert run.row.assumed == ("seq", "sp", "recompute")


def test_without_assumed_fields_there_is_no_range() -> None:
    assert predicted_range(RUNS["kor22_t5_22B_full"]) is None


def test_a_field_without_alternatives_gives_a_point() -> None:
    for run in (assuming("kor22_t5_22B_full", "locator"), assuming("titan_t2_0", "sp")):
        over = predicted_range(run)
        assert over is not None
        assert over.low == over.high == pytest.approx(predict(run.job).step_seconds)


def test_recompute_and_sequence_parallelism_by_hand() -> None:
    """Of the six combinations the two without recompute do not fit an A100 (Korthikanti et al. 2022, Figure 1)."""
    run = assuming("kor22_t5_22B_seqsel", "recompute,sp")
    over = predicted_range(run)
    assert over is not None
    cells = [{"recompute": mode, "sp": sp} for mode in ("selective", "full") for sp in "01"]
    seconds = [predict(run_from_row(run.row.printed(one)).job).step_seconds for one in cells]
    assert over.combinations == 1 + len(cells)
    assert (over.low, over.high) == (pytest.approx(min(seconds)), pytest.approx(max(seconds)))


def test_what_does_not_fit_is_not_plausible() -> None:
    run = assuming(H100_70B, "recompute,sp")
    without = run_from_row(run.row.printed({"recompute": "none", "sp": "0"}))
    assert peak_memory(without.job).total > without.job.cluster.device.memory
    over = predicted_range(run)
    assert over is not None
    assert over.combinations < 1 + 3 * 2


def test_microbatches_keep_the_batch_whole_and_chunks_the_layers() -> None:
    cells = {field.names[0]: field.cells for field in FIELDS}
    run = RUNS["mcore_h100_70B"]  # 84 layers in 2 stages, 8 sequences per rank
    assert [one["mbs"] for one in cells["mbs"](run)] == ["1", "2", "4", "8"]
    assert [one["vpp"] for one in cells["vpp"](run)] == ["2", "3", "6", "7", "14", "21", "42"]
    assert cells["vpp"](RUNS["zb_6.2B_1F1B_24"]) == []
    assert [one["vpp"] for one in cells["vpp"](RUNS["zb_6.2B_1F1B-I_24"])] == ["2", "4"]


def test_a_sequence_that_changes_the_report_is_compared_with_what_it_would_be() -> None:
    """Tokens/s times another sequence length is another step time: the ratio counts, not the seconds."""
    run = assuming("titan_t1_1", "seq")
    over = predicted_range(run)
    assert over is not None
    half = run_from_row(run.row.printed({"seq": "4096"}))
    assert half.reported_seconds == pytest.approx(run.reported_seconds / 2)
    assert over.low == pytest.approx(2 * predict(half.job).step_seconds)
    assert over.high / over.low < 1.1


def test_an_empty_vocabulary_is_open_whatever_the_row_lists() -> None:
    over = predicted_range(assuming("zb_6.2B_1F1B_24", ""))
    assert over is not None
    assert over.fields == ("vocab",)
    assert over.high > over.low


def test_many_fields_are_bounded() -> None:
    run = assuming("mcore_h100_70B", "sp,recompute,mbs,vpp,precision,seq,zero,vocab", gbs="3072")
    over = predicted_range(run)
    assert over is not None
    assert over.combinations <= 301
