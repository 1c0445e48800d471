"""Writes docs/cases/*.md: trainings that others have published, as they laid them out and as the planner would.

python docs/make_cases.py            # all pages, in a few minutes
python docs/make_cases.py ascend     # one of them
python docs/make_cases.py --check    # whether they are what the planner says today

What is published comes from its source (the tables in `validation/`, the jobs in `examples/`, the figures here); every
predicted figure, and every reason why the two differ, is the planner's own: `plan --why-not` with those degrees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import shardwise
from shardwise.accuracy.runs import PublishedRun, read_runs
from shardwise.cost.analysis import analyze
from shardwise.planner.advice.explanation import WhyNot, largest_differences
from shardwise.planner.candidate import Candidate, candidate, strategy_words
from shardwise.spec.clusters import cluster_from
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.units import readable_bytes, readable_seconds

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "cases"
TABLES = ("training_runs.csv", "training_runs_2.csv")
DEGREES = ("tp", "cp", "pp", "dp", "ep")


@dataclass(frozen=True)
class CaseRun:
    """One published training; ``seconds`` is its step as reported, None where no time is.

    With ``open`` its source leaves all but the degrees open, which the planner completes; with ``variants``, a few
    choices.
    """

    name: str
    job: Job
    seconds: float | None
    source: str
    open: bool = False
    variants: Sequence[Mapping[str, Any]] = ()  # what its software could have done, of which the fastest is taken
    laid_out: str = "as published"


@dataclass(frozen=True)
class CasePage:
    """A page of cases; ``about`` is what the authors say, in short."""

    file: str
    title: str
    about: str
    runs: Callable[[], Sequence[CaseRun]]


# -- what is published -----------------------------------------------------------------------------------------


@cache
def _published() -> dict[str, PublishedRun]:
    return {run.row_id: run for table in TABLES for run in read_runs(ROOT / "validation" / table)}


def _rows(*identifiers: str) -> list[CaseRun]:
    found = [_published()[one] for one in identifiers]
    return [
        CaseRun(f"{run.model_name}, {run.job.cluster.devices} × {run.device}", run.job, run.reported_seconds,
                f"{run.row.text('source')} (`{run.row_id}`)")
        for run in found
    ]  # fmt: skip


# Narayanan et al. 2021, Table 1: preset, GPUs, tp, pp, sequences of 2,048 tokens, TFLOP/s a GPU.
_MEGATRON = (
    ("megatron-1.7b", 32, 1, 1, 512, 137), ("megatron-3.6b", 64, 2, 1, 512, 138),
    ("megatron-7.5b", 128, 4, 1, 512, 142), ("megatron-18.4b", 256, 8, 1, 1024, 135),
    ("megatron-39.1b", 512, 8, 2, 1536, 138), ("megatron-76.1b", 1024, 8, 4, 1792, 140),
    ("megatron-145.6b", 1536, 8, 8, 2304, 148), ("megatron-310.1b", 1920, 8, 16, 2160, 155),
    ("megatron-529.6b", 2520, 8, 35, 2520, 163), ("megatron-1t", 3072, 8, 64, 3072, 163),
)  # fmt: skip


# That Megatron-LM recomputed every layer, and had neither ZeRO nor sequence parallelism: what is open is the
# microbatch, and how many chunks of the model a rank interleaves.
_IN_2021 = tuple(
    {"microbatch": microbatch, "interleave": chunks, "schedule": "interleaved" if chunks > 1 else "1f1b"}
    for microbatch in (1, 2, 4, 8)
    for chunks in (1, 2, 3, 4)
)


def _megatron() -> list[CaseRun]:
    found = []
    for preset, gpus, tp, pp, batch, teraflops in _MEGATRON:
        job = Job.from_dict(
            {
                "model": preset,
                "cluster": f"dgx-a100:{gpus // 8}",
                "strategy": {"tp": tp, "pp": pp, "sequence_parallel": False, "recompute": "full",
                             "overlap": {"dp": False}},
                "training": {"global_batch": batch, "seq": 2048, "precision": "fp16", "attention": "unfused",
                             "dropout": True},
                "stack": "megatron-core@2022",
            }
        )  # fmt: skip
        layers, hidden, seq, vocab = job.model.layers, job.model.hidden, 2048, job.model.vocab
        # Its equation 3: a step with every layer's forward pass run again.
        flops = 96 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden) + vocab / (16 * layers * hidden))
        source = f"arXiv 2104.04473, Table 1: {teraflops} TFLOP/s a GPU, counted by its equation 3"
        name = f"GPT {preset.removeprefix('megatron-').upper()}, {gpus:,} A100"
        found.append(CaseRun(name, job, flops / (gpus * teraflops * 1e12), source, variants=_IN_2021))
    return found


def _of_examples(first: int, last: int) -> Callable[[], list[CaseRun]]:
    """The cases of `bench/cases.py`, which are jobs in `examples/`."""

    def runs() -> list[CaseRun]:
        sys.path.insert(0, str(ROOT / "bench"))
        from cases import CASES

        return [CaseRun(one.name, one.job, one.seconds(one.priced()), one.report) for one in CASES[first:last]]

    return runs


def _one_card() -> list[CaseRun]:
    strategy = {"zero": 2, "recompute": "full", "offload": {"optimizer": 1, "gradients": 1}}
    training = {"global_batch": 8, "seq": 4096, "precision": "bf16"}
    job = Job.from_dict(
        {"model": "llama2-7b", "cluster": cluster_from("workstation-4090").with_devices(1), "strategy": strategy,
         "training": training, "stack": "deepspeed"}
    )  # fmt: skip
    source = "ZeRO-Offload, arXiv 2101.06840: fp32 states and gradients on the host; no time is published for this card"
    return [CaseRun("Llama-2 7B, one RTX 4090 (24 GB)", job, None, source, laid_out="ZeRO-Offload")]


def _two_data_centres() -> list[CaseRun]:
    found = []
    for model in ("llama3-8b", "llama3-70b"):
        job = Job.from_dict(
            {
                "model": model,
                "cluster": "two-datacenters",
                "strategy": {"tp": 8, "zero": 1},
                "training": {"global_batch": 512, "seq": 8192, "precision": "bf16"},
            }
        )
        source = "assumed: two sites of 128 H100, 8 × 100 Gb/s over 5,000 km between them"
        found.append(CaseRun(f"{model} on 2 × 128 H100", job, None, source, open=True, laid_out="textbook"))
    return found


PAGES = (
    CasePage(
        "megatron", "Megatron GPT, 1.7B to 1T parameters on A100",
        "Tensor parallelism fills the node, pipelines go across nodes, data parallelism takes the rest; every layer is "
        "recomputed. Microbatch and schedule are not printed for each size. All ten sizes of the table.",
        _megatron,
    ),
    CasePage(
        "llama3-405b", "Llama-3 405B on 8,192 and 16,384 H100",
        "TP 8 inside a node, 16 stages, FSDP that keeps its parameters, 16-way context parallelism for long sequences.",
        _of_examples(1, 4),
    ),
    CasePage(
        "deepseek-v3", "DeepSeek-V3 on 2,048 H800",
        "No tensor parallelism: 16 stages (DualPipe), 64-way expert parallelism over 8 nodes, ZeRO-1, FP8.",
        _of_examples(0, 1),
    ),
    CasePage(
        "tpu-fsdp", "FSDP on a TPU torus",
        "Gemini-style training: fully sharded data parallelism along two axes of a torus of TPU v5p, tensor "
        "parallelism along the third, as MaxText publishes it.",
        lambda: _rows("maxtext_TPU-v5p_128B_1xv5p-256", "maxtext_TPU-v5p_256B_1xv5p-1024"),
    ),
    CasePage(
        "ascend", "Qwen on Ascend 910B",
        "MindSpeed-LLM's own example scripts: TP 8 in a node of eight, linked pair by pair, and pipelines over RoCE.",
        lambda: _rows("ascend_Qwen_72B_8K_16x8", "ascend_Qwen2.5_7B_32K_1x8", "ascend_Qwen2.5_14B_32K_2x8"),
    ),
    CasePage(
        "one-node-13b", "13B on one node of eight A100",
        "FSDP over the eight GPUs of one node, with and without recompute, as llm-foundry publishes it.",
        lambda: _rows("foundry_a100_80gb_13b_s2048_n8_gbs48_mb2_amp_bf16_FULL_SHARD_l177",
                      "foundry_a100_80gb_13b_s8192_n8_gbs120_mb5_amp_bf16_FULL_SHARD_ac_l175"),
    ),
    CasePage(
        "one-card-7b", "7B on one 24 GB card",
        "16 bytes of states for each of 6.7 billion parameters do not fit; ZeRO-Offload keeps fp32 states and "
        "gradients in the host's memory.",
        _one_card,
    ),
    CasePage(
        "two-data-centres", "Two data centres",
        "A link of 800 Gb/s for 128 GPUs, and 25 ms one way. The textbook fills the node with tensor parallelism and "
        "sums gradients over everything, in every step.",
        _two_data_centres,
    ),
)  # fmt: skip


# -- what the planner says ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planned:
    """A published training beside what the planner finds for the same software."""

    case: CaseRun
    published: Candidate | None  # its layout, completed where the source is silent; None if it cannot be priced
    best: Candidate
    why_not: WhyNot
    plan: str  # the simplest of those within noise of the fastest, in words
    sentence: str


def planned(case: CaseRun) -> Planned:
    strategy = case.job.strategy
    degrees = {name: strategy.degree(name) for name in DEGREES if name != "dp" and strategy.degree(name) > 1}
    asked = ",".join(f"{name}={value}" for name, value in (degrees or {"tp": 1, "pp": 1}).items())
    found = shardwise.plan(case.job, any_priced=True, why_not=[asked])
    fastest = min(found.candidates, key=lambda one: one.seconds_per_token)
    words = strategy_words(found.job.strategy)
    return Planned(case, _as_published(case), fastest, found.answer.why_not[0], words, found.why)


def _as_published(case: CaseRun) -> Candidate | None:
    if case.variants:
        return min(_variants(case), key=lambda one: one.seconds_per_token, default=None)
    if not case.open:
        return candidate(case.job)
    degrees: dict[str, Any] = {name: case.job.strategy.degree(name) for name in DEGREES}
    try:
        found = shardwise.plan(case.job, any_priced=True, max_memory="100%", **degrees)
    except SpecError:
        return None
    return min(found.candidates, key=lambda one: one.seconds_per_token)


def _variants(case: CaseRun) -> Iterator[Candidate]:
    """Those that divide, and fit."""
    for changes in case.variants:
        try:
            job = replace(case.job, strategy=replace(case.job.strategy, **changes))
        except SpecError:
            continue
        if analyze(job).fits:
            yield candidate(job)


# -- the pages -------------------------------------------------------------------------------------------------------


def page(one: CasePage) -> str:
    runs = one.runs()
    made = f"Generated by `python docs/make_cases.py {one.file}`. All cases: [cases](../cases.md)."
    parts = [f"# {one.title}\n\n{made}\n\n{one.about}\n\n{_rows_explained(runs[0])}\n"]
    return "\n".join([*parts, *("\n".join(_section(planned(case))) for case in runs)])


def _rows_explained(case: CaseRun) -> str:
    published = "" if case.seconds is None else "*Published* is the step that the source reports. "
    return (
        f"{published}*{_capitalised(case.laid_out)}* is the prediction for that layout (what the source leaves open, "
        "as fast as that software allows). *Planner* is the fastest layout that it finds for the same software."
    )


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]


def _section(found: Planned) -> Iterator[str]:
    case, job = found.case, found.case.job
    yield f"## {case.name}\n"
    yield f"{case.source}. {job.sequences:,} sequences of {job.training.seq:,} tokens a step.\n"
    timed = case.seconds is not None
    yield f"| | step |{' of published |' * timed} memory | layout |"
    yield f"|---|---:|{'---:|' * timed}---:|---|"
    if case.seconds is not None:
        yield f"| published | {readable_seconds(case.seconds)} | 1.00 | | |"
    rows = [(case.laid_out, found.published), ("planner", found.best)]
    for name, one in rows:
        if one is not None:
            share = f" {one.step_seconds / case.seconds:.2f} |" if case.seconds else ""
            words = strategy_words(one.job.strategy)
            yield f"| {name} | {readable_seconds(one.step_seconds)} |{share} {_memory(one)} | {words} |"
    yield ""
    yield "Why they differ:\n"
    yield from (f"- {line}" for line in _reasons(found))
    yield ""


def _memory(one: Candidate) -> str:
    usable = one.job.cluster.device.usable_memory
    return f"{readable_bytes(one.memory.total)} of {readable_bytes(usable)}"


def _reasons(found: Planned) -> Iterator[str]:
    published, best = found.published, found.best
    if published is None:
        yield "The published degrees cannot be priced for this software."
    else:
        name = _capitalised(found.case.laid_out)
        if published.job.strategy == best.job.strategy:
            yield "They do not: the planner finds the layout that was published."
            return
        fit = analyze(published.job).fit
        if fit != "fits":
            yield f"{name}: it {fit if fit != 'tight' else 'fits tightly'}: {_memory(published)}."
        loss = published.loss_to(best)
        differences = largest_differences(best, published)
        yield f"{name}: the step takes {loss:+.1%} against the planner's: {differences} (shares of the planner's step)."
    asked = found.why_not
    yield f"Asked why not {asked.wanted}, the planner answers: {asked.verdict}; {asked.reason}."
    yield f"The plan that it would write is {found.plan}. {found.sentence}"


def main(arguments: Sequence[str]) -> int:
    named = [one for one in arguments if one != "--check"]
    known = {one.file: one for one in PAGES}
    for name in named:
        if name not in known:
            raise SystemExit(f"no case is named {name}; choose from {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for one in [known[name] for name in named] or PAGES:
        path, text = FOLDER / f"{one.file}.md", page(one)
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(one.file)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}", flush=True)
        else:
            print(f"out of date: {path.relative_to(ROOT)}", flush=True)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
