"""Which formats a processor multiplies quickly, and that a job in another one is told."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from cli.running import run
from shardwise.launch.preflight import preflight
from shardwise.spec import Cluster, Job
from shardwise.spec.clusters import cluster_from
from shardwise.spec.files import dump_yaml
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32-grads", "fp16", "fp32"])
def test_a_run_on_a_slower_processor_than_planned_is_told_what_to_set(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(AVX_2)
    monkeypatch.setattr(slow_precision_notes, "__defaults__", (tmp_path / "cpuinfo",))
    training = {"global_batch": 2, "seq": 16, "precision": precision}
    job = Job.from_dict({"model": "tiny", "cluster": fast_at(("bf16", "fp16")), "training": training})
    notes = preflight(job).notes
    assert [("--precision fp32" in note) for note in notes] == ([] if precision == "fp32" else [True])


def fast_at(formats: Collection[str]) -> Cluster:
    """A CPU with instructions for these formats, as `calibrate` describes one."""
    cluster: Cluster = cluster_from("laptop:2")
    peak = {"fp32": 1e11, **{name: 1e11 if name in formats else 1e8 for name in ("bf16", "fp16")}}
    return replace(cluster, device=replace(cluster.device, name="measured", peak=peak))


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("verb", "formats"),
    [("plan", ("bf16", "fp16")), ("plan", ()), ("analyze", ("bf16",)), ("analyze", ("fp16",)), ("train", ())],
)
def test_every_verb_takes_the_precision_that_the_device_is_fast_at(
    verb: str, formats: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the description of the device alone, whatever machine asks; and says why. Saying one has the last word."""
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(dump_yaml(fast_at(formats).to_dict()), encoding="utf-8")
    flags = [verb, "--model", "tiny", "--cluster", "cluster.yaml", "--seq", "16", "--global-batch", "2"]
    flags += {"plan": ["--out", "job.yaml"], "analyze": ["--dp", "2"], "train": ["--dp", "2", "--steps", "1"]}[verb]
    chosen = "bf16" if "bf16" in formats else "fp32"
    found = run(*flags)
    assert found.status == 0
    said = (found.out + found.err).replace("\n", " ")
    assert ("measured has no bf16 instructions: fp32 is 1,000 times as fast" in said) == (chosen == "fp32")
    if verb == "analyze":
        assert f"zero 0, {chosen}," in said
        return
    file = Path("job.yaml") if verb == "plan" else next(Path("runs").glob("*/job.yaml"))
    job = Job.from_yaml(file.read_text(encoding="utf-8"))
    assert job.training.precision == chosen
    for precision in ("bf16", "fp32"):
        asked = replace(job, training=replace(job.training, precision=precision))
        assert Job.from_yaml(asked.to_yaml()) == asked
