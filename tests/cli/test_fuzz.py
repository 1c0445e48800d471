"""Random, mostly hostile input: status 0 (1 where a job does not fit), or one line and status 2, always.

Of the Python API: a result, or a SpecError. Hostile files have `test_bad_files.py`.
"""

from __future__ import annotations

import inspect
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli.running import Result, error_line, run, strict_json, without_notes
from interop.published_configs import CATALOGUE
from shardwise import api
from shardwise.api.given import JobKeywords
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown

# What would fit a job of nonsense is looked for in hundreds of them: a moment for each.
pytestmark = pytest.mark.usefixtures("short_searches")
# Of each of the five kinds of input: 6,000 in all, and 1,000, always the same, in `make test`.
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]
RUNS_PER_SEED = 100

HOSTILE = [
    "", " ", "0", "-1", "-0", "+5", "1.5", "1e3", "1e400", "-1e400", "1e18", "999999999999999999999", "nan", "inf",
    "-inf", "NaN", "0x8", "8xx8", "8x", "x8", "8x8", "0x10", "x", "None", "null", "true", "[]", "{}", "[1, 2]", "~",
    "١٢", "八", "🦙", "\u202e8", "a\nb", "\t", "\x00", "é" * 200, "9" * 5000, "9" * 400, "a/" + "b" * 300,
    "b" * 300 + ".json", "a/\x00.yaml", "1_000", "1,2", ",", ",,", "--", "-",
    "80GiB", "80 GB", "5us", "-5us", "400Gb/s", "0GB/s", "1e300GB/s", "5%", "16M-tokens", "0-tokens", "tokens", "../x",
    "/", "/dev/null", "/nonexistent/job.yaml", ".", "..", "*", "$(true)", "%s", "{0}", "!!python/object:os.system",
    "1", "7", "64", "1e9", "1e15", "1e17", "1e-9", "1e-300", "1e300", "1e308", "0.5", "1e15GB/s",
    "1e-300GB/s", "1e300s", "&a *a", "a: b: c", "'", '"', "#", "1e-320", "2**3", "0b11", "1e", "e5", "Infinity",
]  # fmt: skip
PLAUSIBLE = {
    "--tp": ["1", "2", "4", "8", "3"],
    "--pp": ["1", "2", "4", "8", "5"],
    "--dp": ["1", "2", "4", "8", "16"],
    "--cp": ["1", "2", "4", "3"],
    "--ep": ["1", "2", "8", "64"],
    "--expert-tp": ["1", "2", "4"],
    "--zero": ["0", "1", "2", "3", "4"],
    "--shard-group": ["1", "2", "8"],
    "--order": ["tp,cp,dp,pp", "pp,dp,cp,tp", "dp,tp", "tp,tp,tp,tp"],
    "--microbatch": ["1", "2", "4"],
    "--schedule": ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-min", "dualpipe", "dualpipev"],
    "--interleave": ["1", "2", "4"],
    "--stage-layers": ["even", "balanced", "7,8,8,9", "1,1"],
    "--recompute": ["none", "selective", "full"],
    "--context-method": ["ring", "all-gather", "ulysses"],
    "--dispatch": ["all-to-all", "deduplicated"],
    "--collective": ["auto", "textbook", "ring", "double_tree", "bucket"],
    "--global-batch": ["1", "64", "1024", "4M-tokens", "1e15"],
    "--seq": ["1", "128", "8192", "1M"],
    "--precision": ["bf16", "fp8", "fp32", "nvfp4"],
    "--optimizer": ["adamw", "muon", "sgd"],
    "--attention": ["flash", "unfused"],
    "--gpus": ["1", "8", "64", "512", "7"],
    "--gpus-per-node": ["1", "4", "8", "9"],
    "--set": ["strategy.overlap.tp=true", "strategy.offload.optimizer=1", "training.tokens=1e12", "strategy.tp=[1]",
              "model.layers=3", "cluster=laptop", "strategy.offload.target=nvme", "strategy.recompute_layers=2"],
    "--params": ["70e9", "7B", "30B"],
    "--layers": ["32", "1", "80"],
    "--hidden": ["4096", "8192"],
    "--heads": ["32", "8", "64"],
    "--kv-heads": ["8", "8", "1"],
    "--ffn": ["16384", "1024"],
    "--vocab": ["32000", "1"],
    "--topology": ["ring", "tree", "switch", "mesh", "torus", "line", "fully-connected", "hierarchical", "star"],
    "--shape": ["8x8", "4x4x4", "2x4", "64"],
    "--bandwidth": ["450GB/s", "1B/s", "450GB/s,50GB/s"],
    "--latency": ["2us", "0", "2us,5us"],
    "--device": ["a100-80gb", "h100-sxm", "cpu", "h100"],
    "--tokens": ["15T", "1e9"],
    "--price": ["2.5/h", "$3"],
    "--mtbf": ["50700h", "3h", "50700"],
    "--checkpoint-seconds": ["30s", "0"],
    "--restart-seconds": ["10min", "0"],
    "--no-sp": None, "--dropout": None, "--json": None, "--scaling": None, "--ranks": None, "--sources": None,
}  # fmt: skip
BARE = ("--params", "--layers", "--hidden", "--heads", "--kv-heads", "--ffn", "--vocab", "--topology", "--shape",
        "--bandwidth", "--latency", "--device")  # fmt: skip
FLAGS = [flag for flag in PLAUSIBLE if flag not in BARE or flag in ("--params", "--device")]
MODELS = [*presets.names("model"), "llama", "gpt4"]
CLUSTERS = [*presets.names("cluster"), "dgx-h100:2", "dgx-a100:8", "tpu-v5p:8x8x4", "gb200-nvl72:2", "dgx-h100:0",
            "dgx-h100:99999999", "tpu-v4:0x4x4", "dgx"]  # fmt: skip


def random_flags(rng: random.Random) -> list[str]:
    """A command that is half right: named parts, then a few flags, each with a plausible or a hostile value."""
    arguments = [rng.choice(["analyze"] * 30 + ["list", "anlyze", "", "--help", "-h", "help", "--version"])]
    if rng.random() < 0.85:
        arguments += ["--model", rng.choice(MODELS)]
    if rng.random() < 0.85:
        arguments += ["--cluster", rng.choice(CLUSTERS)]
    if rng.random() < 0.8:
        arguments += ["--global-batch", rng.choice(["512", "4M-tokens", "16M-tokens"])]
    for flag in rng.sample(FLAGS, rng.choice([0, 1, 1, 2, 3, 5])):
        values = PLAUSIBLE[flag]
        if values is None:
            arguments.append(flag)
            continue
        value = rng.choice(HOSTILE) if rng.random() < 0.25 else rng.choice(values)
        arguments += [f"{flag}={value}"] if rng.random() < 0.3 else [flag, value]
    if rng.random() < 0.1:
        arguments.insert(rng.randint(1, len(arguments)), rng.choice(HOSTILE))
    if rng.random() < 0.5:
        arguments.append("--json")
    return arguments


def random_bare_numbers(rng: random.Random) -> list[str]:
    """A job without presets, from the flags for bare numbers, now and then hostile or left out."""
    topology = rng.choice(PLAUSIBLE["--topology"] or [])
    grid, levels = topology in ("mesh", "torus"), 2 if topology == "hierarchical" else 1
    given = {
        "--layers": "32",
        "--hidden": "4096",
        "--heads": "32",
        "--topology": topology,
        "--bandwidth": ",".join(["50GB/s"] * levels),
        **({"--shape": "8x8"} if grid and rng.random() < 0.5 else {"--gpus": "64"}),
        **({"--params": "7B"} if rng.random() < 0.5 else {}),
        "--global-batch": "64",
        "--tp": rng.choice(["1", "2", "8"]),
    }
    for flag in rng.sample([*BARE, "--gpus", "--global-batch"], rng.choice([0, 1, 1, 2, 3])):
        given[flag] = rng.choice(HOSTILE) if rng.random() < 0.5 else rng.choice(PLAUSIBLE[flag] or [])
    if rng.random() < 0.1:
        del given[rng.choice(sorted(given))]
    return ["analyze", *(word for pair in given.items() for word in pair), "--json"]


EXPLAINED = ["all-reduce", "allgather", "reduce-scatter", "all-to-all", "broadcast", "reduce", "gather", "scatter",
             "p2p", "zero", "activations", "flops", "mfu", "bubble", "scaling", "tp", "dp", "pp", "cp", "ep",
             "tea"]  # fmt: skip
EXPLAIN_FLAGS = {
    "--size": ["1GiB", "1", "0", "3MB"], "--algorithm": ["ring", "auto", "textbook", "magic"],
    "--link": ["infiniband-ndr", "pcie"], "--tokens": ["300B"], "--microbatches": ["32"], "--step-seconds": ["12s"],
    "--t1": ["10s"], "--factor": ["8", "64", "7"], "--strong": ["1.5s"], "--weak": ["11s"],
    **{flag: PLAUSIBLE[flag] for flag in (*BARE, "--dp", "--tp", "--pp", "--cp", "--ep", "--seq", "--gpus")},
}  # fmt: skip


def random_explanation(rng: random.Random) -> list[str]:
    arguments = ["explain", rng.choice(EXPLAINED)]
    for flag in rng.sample(sorted(EXPLAIN_FLAGS), rng.choice([0, 1, 1, 2, 4])):
        arguments += [flag, rng.choice(HOSTILE) if rng.random() < 0.4 else rng.choice(EXPLAIN_FLAGS[flag] or [])]
    return [*arguments, *(["--json"] if rng.random() < 0.5 else [])]


JOB = """\
model:
  layers: 8
  hidden: 512
  heads: 8
  kv_heads: 4
  ffn: 2048
  vocab: 32000
  activation: swiglu
cluster:
  device:
    name: mine
    peak: {bf16: 100TFLOPS, fp32: 50TFLOPS}
    memory: 24GiB
    memory_bandwidth: 1TB/s
  levels:
    - {name: inner, topology: switch, size: 4, bandwidth: 50GB/s, latency: 2us}
    - {name: outer, topology: ring, size: 2, link: infiniband-ndr, startup: 5us}
  host_memory: 512GB
  host_link: pcie-4
  storage:
    - {name: disk, link: nvme-gen4}
strategy:
  tp: 2
  pp: 2
  zero: 1
  microbatch: 2
  order: [tp, cp, dp, pp]
  overlap: {tp: true}
  offload: {optimizer: 0.5, target: cpu}
training:
  global_batch: 16
  seq: 1024
  precision: bf16
  tokens: 1e9
"""


def random_job(rng: random.Random) -> bytes:
    """A valid job file with its bytes, lines or values disturbed."""
    lines = JOB.splitlines()
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(5):
            case 0:
                del lines[i]
            case 1:
                lines.insert(j, lines[i])
            case 2:
                lines[i], lines[j] = lines[j], lines[i]
            case _:
                lines[i] = _other_value(rng, lines[i])
    data = bytearray("\n".join(lines).encode(errors="replace"))
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _other_value(rng: random.Random, line: str) -> str:
    """The line with one of its values replaced by a hostile one."""
    values = list(re.finditer(r"(?<=: )[^,{}]+", line))
    if not values:
        return line + " " + rng.choice(HOSTILE)
    place = rng.choice(values)
    return line[: place.start()] + rng.choice(HOSTILE) + line[place.end() :]


def random_config(rng: random.Random) -> bytes:
    """A published config.json with keys lost, values exchanged or bytes flipped."""
    config: dict[str, Any] = dict(CATALOGUE[rng.choice(sorted(CATALOGUE))][1])
    hostile = [*HOSTILE, 0, -1, 1, 3, 2**40, 10**30, 1.5, 1e308, True, None, [], [1], {}, {"a": 1}]
    for key in rng.sample(sorted(config), min(len(config), rng.randint(0, 2))):
        if rng.random() < 0.3:
            del config[key]
        else:
            config[key] = rng.choice(hostile)
    data = bytearray(json.dumps(config).encode())
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.fixture
def short_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.planner.advice.assessment.SEARCH_SECONDS", 0.05)


def check(arguments: list[str], result: Result) -> None:
    if result.status == 2:
        error_line(result)
    else:
        assert result.status in (0, 1)  # 1: the job does not fit
        assert not without_notes(result.err)
        if "--json" in arguments and not {"-h", "--help", "help", "--version"} & set(arguments):
            strict_json(result.out)


def fuzz(make: Callable[[random.Random], list[str]], seed: int) -> set[Any]:
    """Runs many inputs; a failure names the arguments that bring it back."""
    rng = random.Random(seed)
    statuses = set()
    for _ in range(RUNS_PER_SEED):
        arguments = make(rng)
        try:
            result = run(*arguments)
            check(arguments, result)
        except BaseException as error:
            error.add_note(f"shardwise {arguments!r}")
            raise
        statuses.add(result.status)
    return statuses


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("make", [random_flags, random_bare_numbers, random_explanation])
def test_flags(make: Callable[[random.Random], list[str]], seed: int) -> None:
    assert fuzz(make, seed) - {1} == {0, 2}


@pytest.mark.parametrize("seed", SEEDS)
def test_job_files(seed: int, tmp_path: Path) -> None:
    def command(rng: random.Random) -> list[str]:
        (tmp_path / "job.yaml").write_bytes(random_job(rng))
        return ["analyze", str(tmp_path / "job.yaml"), *(["--json"] if rng.random() < 0.8 else [])]

    assert fuzz(command, seed) - {1} == {0, 2}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_hugging_face_configs(seed: int, tmp_path: Path) -> None:
    def command(rng: random.Random) -> list[str]:
        (tmp_path / "config.json").write_bytes(random_config(rng))
        cluster = ["--cluster", "dgx-h100:2", "--tp", rng.choice(["1", "8"]), "--global-batch", "16"]
        return ["analyze", "--model", str(tmp_path / "config.json"), *cluster, "--json"]

    assert fuzz(command, seed) - {1} == {0, 2}


# -- keywords of the Python API --------------------------------------------------------------------------------------

NESTED: list[Any] = []
for _ in range(2000):
    NESTED = [NESTED]
# No keyword means any of these, but for a few that take whatever is true.
OF_NO_TYPE: list[Any] = [
    -1, 1.5, float("nan"), float("inf"), 10**400, 10**5000, "x", "\0", "\ud800", b"x", [5], [None], {"a": 1}, {1: 2},
    (1,), object(), object, len, {"x"}, range(3), 1j, NESTED, [[]], ..., [10**5000],
]  # fmt: skip
# A job that is refused at the end, so that nothing is searched or started.
NO_JOB = {"model": "tiny", "cluster": "laptop:2", "global_batch": 8, "seq": 128, "stage_layers": "1,1,1"}
NO_FILE = "/nonexistent/run"
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("analyze", "predict", "plan", "plan_mixed", "verify", "train", "write_report"), NO_JOB),
    "status": {"run": NO_FILE}, "compare": {"run": NO_FILE}, "validate": {"table": NO_FILE},
    "finetune": {"model": NO_FILE, "data": NO_FILE},
    "calibrate": {"processes": 0}, "generate": {"source": NO_FILE, "prompt": "a"},
}  # fmt: skip


def calls_of_wrong_types() -> list[tuple[str, str, Any]]:
    """Every keyword of every verb with each value."""
    found = []
    for verb in api.VERBS:
        known = inspect.signature(getattr(api, verb)).parameters.values()
        own = [one.name for one in known if one.kind is not one.VAR_KEYWORD]
        open_ended = any(one.kind is one.VAR_KEYWORD for one in known)
        names = [*own, *(JobKeywords.__annotations__ if open_ended else ())]
        found += [
            (verb, name, value)
            for name in names
            if not name.startswith(("on_", "watch", "note"))
            for value in OF_NO_TYPE
        ]
    return found


@pytest.mark.parametrize("share", [60, pytest.param(1, marks=pytest.mark.slow)], ids=["some", "all"])
def test_keywords_of_wrong_types(share: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    calls = calls_of_wrong_types()
    random.Random(0).shuffle(calls)
    assert set(BESIDE) == set(api.VERBS) and len(calls) > 10_000
    for verb, name, value in calls[::share]:
        try:
            getattr(api, verb)(**{**BESIDE[verb], name: value})
        except SpecError as error:
            assert "\n" not in str(error)
        except BaseException as error:
            error.add_note(f"{verb}({name}={shown(value)})")
            raise


@pytest.mark.parametrize("keyword", ["exclude", "why_not", "what_if"])
@pytest.mark.parametrize("value", [[5], 5, {"tp": 8}, [None], b"tp=8"], ids=str)
def test_questions_of_a_plan_are_texts(keyword: str, value: Any) -> None:
    with pytest.raises(SpecError, match=f"^{keyword}: .* is not text"):
        api.plan(model="tiny", cluster="laptop:2", global_batch=8, **{keyword: value})
