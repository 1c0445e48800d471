"""Which formats a processor multiplies quickly, and that a job in another one is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.running import run
from shardwise.launch.preflight import preflight
from shardwise.spec import Job, installation
from shardwise.spec.installation import slow_formats, slow_precision_notes

AVX_2 = "flags\t\t: fpu sse4_2 fma avx avx2 f16c"
AVX_512 = AVX_2 + " avx512f avx512dq avx512bw avx512vl"
CASES = {
    "avx2": (AVX_2, ("bf16", "fp16")),
    "avx512": (AVX_512, ("fp16",)),
    "sapphire-rapids": (AVX_512 + " avx512_bf16 avx512_fp16 amx_bf16", ()),
    "sierra-forest": (AVX_2 + " avx_vnni avx_ne_convert", ("fp16",)),
    "neoverse-n1": ("Features\t: fp asimd fphp asimdhp asimddp", ("bf16", "fp16")),
    "neoverse-v1": ("Features\t: fp asimd fphp asimdhp asimddp sve bf16 i8mm", ("fp16",)),
    "untold": ("processor\t: 0", ()),
}


@pytest.mark.parametrize("case", CASES)
def test_formats_by_instructions(case: str, tmp_path: Path) -> None:
    told, expected = CASES[case]
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{told}\n\nprocessor\t: 1\n{told}\n")
    assert slow_formats(tmp_path / "cpuinfo") == expected


def test_where_nothing_is_told_nothing_is_slow(tmp_path: Path) -> None:
    assert slow_formats(tmp_path / "cpuinfo") == ()


@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32-grads", "fp16", "fp32"])
def test_a_run_on_a_slow_processor_is_told_what_to_set(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(AVX_2)
    monkeypatch.setattr(slow_precision_notes, "__defaults__", (tmp_path / "cpuinfo",))
    training = {"global_batch": 2, "seq": 16, "precision": precision}
    job = Job.from_dict({"model": "tiny", "cluster": "laptop:1", "training": training})
    notes = preflight(job).notes
    assert [("--precision fp32" in note) for note in notes] == ([] if precision == "fp32" else [True])


def test_a_plan_for_processors_says_so_whatever_machine_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(installation, "CPUINFO", tmp_path / "none")
    flags = ["plan", "--model", "tiny", "--cluster", "laptop:2", "--seq", "64", "--global-batch", "4"]
    assert "a CPU without instructions for bf16 takes many times as long" in run(*flags).out
    assert "instructions" not in run(*flags, "--precision", "fp32").out
