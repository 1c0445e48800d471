"""`shardwise analyze`: where its input comes from, and that its tables say what they promise."""

from __future__ import annotations

import json
import shlex
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cli.running import HEADLINE, error_line, run, run_json
from interop.published_configs import CATALOGUE
from shardwise.cli.main import main
from shardwise.spec import Job
from shardwise.spec.units import readable_bytes, readable_count, readable_flops, readable_seconds

JOB = """\
model: llama3-8b
cluster: dgx-h100:2
strategy: {tp: 8, zero: 1, offload: {optimizer: 0.5}}
training: {global_batch: 64, seq: 2048}
"""


def analyzed(command: str) -> Any:
    return run_json(*shlex.split(command))


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


# -- input -------------------------------------------------------------------------------------------


def test_a_job_file_and_the_same_flags_agree(job_file: str) -> None:
    flags = "analyze --model llama3-8b --cluster dgx-h100:2 --tp 8 --zero 1 --global-batch 64 --seq 2048"
    assert analyzed(f"analyze {job_file}") == analyzed(f"{flags} --set strategy.offload.optimizer=0.5")


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--model llama3.2-3b", "model", "llama3.2-3b"),
        ("--cluster dgx-a100:4", "cluster", "dgx-a100:4"),
        ("--gpus 64", "cluster", "dgx-h100:8"),
        ("--tp 4", "strategy.tp", 4),
        ("--zero 3", "strategy.zero", 3),
        ("--seq 4096", "training.seq", 4096),
        ("--no-sp", "strategy.sequence_parallel", False),
        ("--dropout", "training.dropout", True),
        ("--order dp,tp,cp,pp", "strategy.order", ["dp", "tp", "cp", "pp"]),
        ("--pp 2 --stage-layers 15,17", "strategy.stage_layers", [15, 17]),
        ("--set strategy.overlap.tp=true", "strategy.overlap", {"tp": True}),
        ("--set strategy.offload.target=nvme", "strategy.offload", {"optimizer": 0.5, "target": "nvme"}),
        ("--set 'training={global_batch: 32}'", "training", {"global_batch": 32}),
        ("--set training.tokens=1T", "training.tokens", 10**12),
        ("--set model.layers=16", "model.layers", 16),
        ("--model llama3.2-3b --set model.layers=16", "model.layers", 16),
        ("--set model.hidden=2048 --set model.heads=16", "model.head_dim", 128),
        ("--set model.numerics.rope_theta=1e6", "model.numerics", {"rope_theta": 1e6}),
        ("--cluster dgx-a100:4 --set cluster.host_memory=1TB", "cluster.host_memory", "1TB"),
    ],
)
def test_flags_override_the_job_file(flags: str, path: str, value: object, job_file: str) -> None:
    job = analyzed(f"analyze {job_file} {flags}")["job"]
    for name in path.split("."):
        job = job[name]
    assert job == value


def test_what_flags_do_not_name_stays_as_the_file_says(job_file: str) -> None:
    before, after = analyzed(f"analyze {job_file}")["job"], analyzed(f"analyze {job_file} --tp 4")["job"]
    assert [before["strategy"].pop(name) for name in ("tp", "dp")] == [8, 2]
    assert [after["strategy"].pop(name) for name in ("tp", "dp")] == [4, 4]
    assert after == before


def test_the_job_in_the_output_brings_the_same_output_back(tmp_path: Path) -> None:
    first = analyzed(f"{HEADLINE} --recompute full --set strategy.overlap.tp=true")
    (tmp_path / "again.yaml").write_text(Job.from_dict(first["job"]).to_yaml())
    assert analyzed(f"analyze {tmp_path}/again.yaml") == first


def test_a_hugging_face_config_or_its_folder_is_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CATALOGUE["meta-llama/Meta-Llama-3-8B"][1]))
    preset, by_file, by_folder = (
        analyzed(f"analyze --model {model} --cluster dgx-h100 --tp 8 --global-batch 8")
        for model in ("llama3-8b", f"{tmp_path}/config.json", tmp_path)
    )
    assert by_file == by_folder
    assert by_file["time"] == preset["time"]
    assert by_file["memory"] == preset["memory"]


def test_bare_numbers_add_up_to_the_parameters_asked_for() -> None:
    data = analyzed(
        "analyze --params 70e9 --layers 80 --hidden 8192 --heads 64 --topology ring --gpus 64 --bandwidth 50GB/s "
        "--tp 8 --global-batch 64"
    )
    assert data["parameters"] == pytest.approx(70e9, rel=1e-3)
    assert data["devices"] == 64
    assert {c["algorithm"] for c in data["dimensions"]["dp"]["collectives"]} == {"ring"}


@pytest.mark.parametrize(
    ("flags", "levels"),
    [
        ("--topology mesh --shape 4x16 --bandwidth 9GB/s", [{"shape": [4, 16], "topology": "mesh"}]),
        ("--topology torus --gpus 64 --bandwidth 9GB/s", [{"shape": [8, 8], "topology": "torus"}]),
        ("--topology hierarchical --gpus 64 --bandwidth 90GB/s,9GB/s", [{"size": 8}, {"size": 8}]),
        ("--topology hierarchical --gpus 64 --gpus-per-node 4 --bandwidth 90GB/s,9GB/s", [{"size": 4}, {"size": 16}]),
        ("--topology hierarchical --shape 8x4x2 --bandwidth 90GB/s,9GB/s,1GB/s",
         [{"size": 8}, {"size": 4}, {"size": 2}]),
        ("--topology fully_connected --gpus 64 --bandwidth 9GB/s", [{"size": 64, "topology": "fully-connected"}]),
    ],
)  # fmt: skip
def test_bare_topologies(flags: str, levels: list[dict[str, Any]]) -> None:
    data = analyzed(f"analyze --model gpt3-6.7b {flags} --global-batch 64")
    assert data["devices"] == 64
    for level, expected in zip(data["job"]["cluster"]["levels"], levels, strict=True):
        assert expected.items() <= level.items()


# -- output ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [HEADLINE, "analyze --model deepseek-v3 --cluster dgx-h100:32 --ep 64 --zero 1 --global-batch 15360 --seq 4096"],
)
def test_text_and_json_give_the_same_figures(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    data = analyzed(command)
    text = " ".join(run(*command.split(), "--details").out.split())
    time, memory = data["time"], data["memory"]
    for figure in (
        f"{readable_count(data['parameters'])} parameters",
        f"on {data['devices']} ×",
        f"in {data['microbatches']} microbatches",
        f"{readable_bytes(memory['total_bytes'])} of {readable_bytes(memory['usable_bytes'])}",
        "fits" if memory["fit"] == "fits" else "DOES NOT FIT",
        readable_flops(data["flops"]["per_step"]),
        *(readable_seconds(seconds) for seconds in time["parts"].values() if seconds),
        readable_seconds(time["predicted_seconds"]),
        readable_seconds(time["floor_seconds"]),
        f"{time['tokens_per_second']:,.0f}",
        f"{data['flops']['mfu']:.1%}",
        data["bottleneck"].removeprefix("Does not fit: ").removesuffix("."),
        *(f"{readable_seconds(dimension['seconds'])} per step" for dimension in data["dimensions"].values()),
        *(readable_bytes(c["size_bytes"]) for d in data["dimensions"].values() for c in d["collectives"]),
    ):
        assert figure in text


def test_the_parts_of_a_step_add_up() -> None:
    data = analyzed(HEADLINE)
    time = data["time"]
    assert sum(time["parts"].values()) == pytest.approx(time["predicted_seconds"])
    assert time["floor_seconds"] < time["predicted_seconds"]
    exposed = {name: dimension["exposed_seconds"] for name, dimension in data["dimensions"].items()}
    assert sum(exposed.values()) == pytest.approx(time["exposed_share"] * time["predicted_seconds"])
    assert all(seconds == pytest.approx(time["parts"][name]) for name, seconds in exposed.items())
    assert data["tokens_per_step"] == data["sequences"] * 8192 == 1024 * 8192
    for dimension in data["dimensions"].values():
        assert sum(c["seconds"] for c in dimension["collectives"]) == pytest.approx(dimension["seconds"])
        for one in dimension["collectives"]:
            waited = one["exposed_seconds"] - one["slowed_seconds"]
            assert one["hidden_seconds"] + waited == pytest.approx(one["seconds"])


@pytest.mark.parametrize(
    ("command", "degrees"),
    [
        ("--model llama3-8b --cluster dgx-h100:4 --tp 4 --cp 2 --pp 2", {"tp": 4, "cp": 2, "dp": 2, "pp": 2}),
        ("--model llama3-8b --cluster dgx-h100:2 --tp 2 --pp 2 --order pp,dp,tp,cp", {"tp": 2, "dp": 4, "pp": 2}),
        ("--model mixtral-8x7b --cluster dgx-h100:4 --tp 2 --pp 2 --ep 4", {"tp": 2, "dp": 8, "pp": 2, "ep": 4}),
        ("--model mixtral-8x7b --cluster dgx-h100:2 --tp 4 --ep 8 --expert-tp 1", {"tp": 4, "dp": 4, "ep": 8}),
        ("--model llama3-8b --cluster tpu-v5p:2x2x4 --tp 4", {"tp": 4, "dp": 4}),
    ],
)  # fmt: skip
def test_the_table_of_ranks(command: str, degrees: dict[str, int]) -> None:
    data = analyzed(f"analyze {command} --global-batch 64 --ranks")
    ranks, per_node = data["ranks"], 4 if "tpu" in command else 8
    assert [place["rank"] for place in ranks] == list(range(data["devices"]))
    for place in ranks:
        assert (place["node"], place["local_rank"]) == divmod(place["rank"], per_node)
    for name, degree in degrees.items():
        groups = defaultdict(list)
        for place in ranks:
            groups[place["groups"][name]].append(place)
        assert sorted(groups) == list(range(data["devices"] // degree))
        for members in groups.values():
            assert sorted(place["coordinates"][name] for place in members) == list(range(degree))
            fixed = [other for other in ("tp", "cp", "dp", "pp") if other != name] if name != "ep" else ["pp"]
            assert len({tuple(place["coordinates"][other] for other in fixed) for place in members}) == 1


def test_the_order_says_which_ranks_are_neighbours() -> None:
    command = "analyze --model llama3-8b --cluster dgx-h100:2 --tp 2 --pp 2 --global-batch 64 --ranks --order"
    inner = analyzed(f"{command} tp,cp,dp,pp")["ranks"]
    outer = analyzed(f"{command} pp,dp,cp,tp")["ranks"]
    assert [inner[rank]["coordinates"]["tp"] for rank in range(4)] == [0, 1, 0, 1]
    assert inner[8]["coordinates"]["pp"] == 1
    assert [outer[rank]["coordinates"]["pp"] for rank in range(4)] == [0, 1, 0, 1]
    assert outer[8]["coordinates"]["tp"] == 1


def test_scaling_efficiencies_are_what_their_formulas_say() -> None:
    data = analyzed(f"{HEADLINE} --scaling")
    strong, weak = data["scaling"]["strong"], data["scaling"]["weak"]
    assert [row["devices"] for row in strong] == [128, 256, 512, 1024, 2048, 4096]
    assert {row["sequences"] for row in strong} == {1024}
    assert [row["sequences"] for row in weak] == [256, 512, 1024, 2048, 4096, 8192]
    for row in strong:
        larger = row["devices"] / strong[0]["devices"]
        assert row["efficiency"] == pytest.approx(strong[0]["predicted_seconds"] / (larger * row["predicted_seconds"]))
    for row in weak:
        assert row["efficiency"] == pytest.approx(weak[0]["predicted_seconds"] / row["predicted_seconds"])


def test_a_row_of_the_scaling_table_is_the_analysis_of_that_size() -> None:
    scaling = analyzed(f"{HEADLINE} --scaling")["scaling"]
    double = HEADLINE.replace("dgx-h100:64", "dgx-h100:128").replace("--dp 16", "--dp 32")
    strong = next(row for row in scaling["strong"] if row["devices"] == 1024)
    weak = next(row for row in scaling["weak"] if row["devices"] == 1024)
    assert strong["predicted_seconds"] == analyzed(double)["time"]["predicted_seconds"]
    doubled_batch = double.replace("--global-batch 1024", "--global-batch 2048")
    assert weak["predicted_seconds"] == analyzed(doubled_batch)["time"]["predicted_seconds"]


def test_the_answer_comes_first_and_the_rest_on_request() -> None:
    screen, everything = run(*HEADLINE.split()).out, run(*HEADLINE.split(), "--details").out
    order = ("\n Memory", "\n Predicted step", "\n Throughput", "\n Bound by", "\nMemory of", "\nPredicted step:")
    for text, then in ((screen, "\nCommunication per step"), (everything, "\nTensor parallel:")):
        places = [text.index(part) for part in (*order, then)]
        assert places == sorted(places)
    assert "Storage" not in screen and "Storage" in everything
    assert screen.index("--details") > screen.index("Communication") and "--details" not in everything


def test_text_with_all_tables_mentions_them() -> None:
    result = run(*"analyze --model gpt2 --cluster dgx-h100 --global-batch 64 --scaling --ranks".split())  # noqa: SIM905
    assert result.status == 0
    for title in ("Strong scaling", "Weak scaling", "Ranks (group.position"):
        assert title in result.out


@pytest.mark.parametrize("what", ["models", "devices", "links", "clusters", "stacks", "collectives"])
def test_the_catalogue_is_listed_as_text_and_as_json(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    rows = run_json("list", what)
    assert all(row["source"] for row in rows)
    text = run("list", what)
    assert text.status == 0
    first = next(iter(rows[0]))
    assert all(str(row[first]) in text.out for row in rows)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("models qwen2.5 7B", ["qwen2.5-7b"]),
        ("models llama-3 70", ["llama3-70b", "llama3.1-70b"]),
        ("clusters gaudi", ["gaudi2-node", "gaudi3-node"]),
        ("devices RTX_30", ["rtx-3090"]),
        ("links nvlink-3", ["nvlink-3", "nvlink-3090"]),
        ("stacks bridge 26.04", ["megatron-bridge@26.04"]),
    ],
)
def test_words_leave_of_a_list_what_is_named_so(typed: str, named: list[str]) -> None:
    assert [row["name"] for row in run_json("list", *typed.split())] == named


@pytest.mark.parametrize("typed", ["models qwenn-7", "models qwen2.5 zzz", "devices h1000x", "schema job"])
def test_a_word_that_nothing_is_named_by_is_one_line(typed: str) -> None:
    assert typed.split()[-1] in error_line(run("list", *typed.split()))


def test_a_named_stack_brings_its_overlap_unless_the_strategy_says_otherwise(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "analyze --model llama3-8b --cluster dgx-h100 --tp 8 --global-batch 8 --json --stack megatron-core"

    def overlap(*more: str) -> object:
        assert main([*command.split(), *more]) == 0
        return json.loads(capsys.readouterr().out)["job"]["strategy"].get("overlap")

    assert overlap() == {"tp": True}
    assert overlap("--set", "strategy.overlap={tp: false}") == {"tp": False}  # else a job file would bring the stack's
