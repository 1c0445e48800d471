"""The steps that predictions are checked on: every row is a job, and saved times are predicted without a GPU."""

from __future__ import annotations

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from shardwise.spec.files import parse_yaml

# From its path: with bench/ among the paths, other tests would find bench/engine.py in place of tests/engine.
_SPEC = spec_from_file_location("unseen_steps", Path(__file__).resolve().parents[1] / "bench" / "unseen_steps.py")
assert _SPEC is not None and _SPEC.loader is not None
bench = sys.modules["unseen_steps"] = module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench)
CONFIGURATIONS, Measured, chosen, compared = bench.CONFIGURATIONS, bench.Measured, bench.chosen, bench.compared
job_of, main, name_of = bench.job_of, bench.main, bench.name_of

ROWS = parse_yaml(CONFIGURATIONS.read_text(encoding="utf-8"), "rows")


def test_rows_are_jobs_of_one_gpu_with_names_of_their_own() -> None:
    jobs = [job_of(row, "dgx-h200") for row in ROWS]
    assert all(job.cluster.devices == 1 and job.stack.is_own for job in jobs)
    assert len({name_of(row) for row in ROWS}) == len(ROWS)
    assert job_of({"model": "gpt2", "sequences": 4, "seq": 512}, "dgx-h200").microbatches == 1


def test_some_rows_are_chosen_by_number() -> None:
    assert chosen("0-2,4", "abcdef") == ["a", "b", "c", "e"]
    assert chosen(None, "ab") == ["a", "b"]


def test_saved_times_are_predicted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"model": "gpt2", "sequences": 4, "seq": 512}
    saved, out = tmp_path / "saved.json", tmp_path / "out.json"
    step = Measured(row, "dgx-h200", 0.01, 10**10, "used")
    saved.write_text(json.dumps({"device": "a GPU", "rows": [{"measured": vars(step)}]}))
    monkeypatch.setattr(sys, "argv", ["unseen_steps.py", "--measured", str(saved), "--out", str(out)])
    assert main() == 0
    assert "gpt2, 4 x 512" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert written["device"] == "a GPU"
    assert written["rows"][0]["catalogue_error"] == compared(step, None).catalogue_error
