"""`--tokens --price --mtbf`: the whole run, as text and as JSON, against Llama 3; and what is refused."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from cli.running import error_line, run, run_json
from shardwise.spec.units import readable_count, readable_duration, readable_money

JOB = "analyze --model llama3-8b --cluster dgx-h100:2 --global-batch 64 --seq 2048"
BARE = "analyze --model llama3-8b --topology ring --gpus 16 --bandwidth 50GB/s --global-batch 64"
# Llama 3 (arXiv 2407.21783), table 4 and section 3.3; it does not print the chunks per rank, 4 is ours.
LLAMA3 = (
    "analyze --model llama3-405b --cluster dgx-h100:2048 --tp 8 --pp 16 --dp 128 --zero 1 --schedule interleaved "
    "--interleave 4 --stage-layers balanced --stack megatron-core@2024 --global-batch 2048 --seq 8192"
)


def campaign(command: str) -> dict[str, Any]:
    data: dict[str, Any] = run_json(*shlex.split(command))["campaign"]
    return data


def test_llama_3_405b_comes_out_as_published() -> None:
    data = campaign(f"{LLAMA3} --tokens 15.6T --price 2.5/h --mtbf 50700h")
    assert data["seconds_between_interruptions"] / 3600 == pytest.approx(54 * 24 / 419, rel=1e-3)
    assert data["interruptions"] / data["days"] == pytest.approx(419 / 54, rel=1e-3)
    assert 0.9 < data["goodput"] < 0.92  # "higher than 90% effective training time"
    assert data["device_hours"] == pytest.approx(30.84e6, rel=0.1)  # its model card
    assert data["checkpoint_storage"] == "parallel filesystem"
    assert data["cost"] == pytest.approx(2.5 * data["device_hours"])


def test_copies_in_memory_save_most_of_the_lost_work() -> None:
    """By hand: 405.9 billion parameters of 14 bytes over 16,384 links to a host, and a checkpoint on disk every ten
    minutes; the work since a copy of ten steps is lost instead of that since a checkpoint.
    """
    terms = "--tokens 15.6T --mtbf 50700h"
    base, data = (campaign(f"{LLAMA3} {terms}{more}") for more in ("", " --set run.checkpoints.memory=10"))
    interval = 10 * 2048 * 8192 / data["tokens_per_second"]
    copy = 405.9e9 * 14 / 16_384 / (0.82 * 63e9)  # PCIe 5
    assert data["checkpoint_interval_seconds"] == pytest.approx(interval)
    assert data["checkpoint_seconds"] == pytest.approx(copy, rel=0.01)
    assert data["best_interval_seconds"] < interval, "a copy costs next to nothing"
    written = copy / interval + base["checkpoint_seconds"] / 600
    assert data["shares"]["checkpoints"] == pytest.approx(data["goodput"] * written, rel=0.01)
    assert data["checkpoint_storage"] == "memory of two nodes"
    assert data["goodput"] > base["goodput"] + 0.02 and data["shares"]["lost"] < base["shares"]["lost"] / 4
    measured = campaign(f"{LLAMA3} {terms} --set run.checkpoints.memory=10 --checkpoint-seconds 0.5s")
    assert measured["checkpoint_seconds"] == 0.5


@pytest.mark.parametrize(
    ("price", "shown"), [("2.5/h", "$2.50"), ("$2.5/h", "$2.50"), ("€2/h", "€2.00"), ("¥ 20", "¥20.00")]
)
def test_money_has_a_currency(price: str, shown: str) -> None:
    command = f"{JOB} --tokens 1T --price '{price}'"
    data, text = campaign(command), " ".join(run(*shlex.split(command)).out.split())
    assert data["currency"] == shown[0]
    assert f"cost at {shown} per device-hour {readable_money(data['cost'], shown[0])}" in text
    assert campaign(f"{JOB} --tokens 1T")["currency"] is None


def test_text_and_json_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    command = f"{JOB} --tokens 1T --price $2.5/h --mtbf 50700h"
    data, text = campaign(command), " ".join(run(*shlex.split(command)).out.split())
    assert "The whole run: 1.00T tokens" in text
    for figure in (
        f"100.0% device-hours {readable_count(data['device_hours'])}",
        f"cost at $2.50 per device-hour ${readable_count(data['cost'])}",
        f"one every {readable_duration(data['seconds_between_interruptions'])} {data['interruptions']:.2f}",
        f"one checkpoint (parallel filesystem) {readable_duration(data['checkpoint_seconds'])}",
        f"best time between checkpoints {readable_duration(data['best_interval_seconds'])}",
        f"one restart {readable_duration(data['restart_seconds'])}",
        f"goodput {data['goodput']:.1%}",
    ):
        assert figure in text


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("--tokens 15T --price 2.5/h", "--tokens 15e12 --price 2.5"),
        ("--tokens 15T --price 2.5/h", "--tokens 15000B --price '$2.5 per GPU-hour'"),
        ("--tokens 1T --mtbf 50700h --restart-seconds 10min", "--tokens 1T --mtbf 50700 --restart-seconds 600"),
        ("--tokens 1T --mtbf 2400h --checkpoint-seconds 30s",
         "--set training.tokens=1T --mtbf 100d --checkpoint-seconds 30"),
    ],
)  # fmt: skip
def test_the_same_said_otherwise(one: str, other: str) -> None:
    assert campaign(f"{JOB} {one}") == campaign(f"{JOB} {other}")


def test_tokens_on_the_command_line_come_before_those_of_the_job() -> None:
    assert campaign(f"{JOB} --set training.tokens=1T --tokens 2T")["tokens"] == 2e12


def test_without_failures_a_run_is_its_tokens_over_its_speed() -> None:
    data = run_json(*shlex.split(f"{JOB} --tokens 1T"))
    whole, speed = data["campaign"], data["time"]["tokens_per_second"]
    assert whole["days"] == pytest.approx(1e12 / speed / 86400)
    assert (whole["goodput"], whole["interruptions"], whole["cost"]) == (1, 0, None)
    assert whole["checkpoint_interval_seconds"] is None
    assert "No interruptions are counted" in run(*shlex.split(f"{JOB} --tokens 1T")).out
    assert "campaign" not in run_json(*shlex.split(JOB))


def test_checkpoints_are_taken_as_the_job_says_and_never_within_a_step() -> None:
    step = run_json(*shlex.split(JOB))["time"]["predicted_seconds"]
    failing = f"{JOB} --tokens 1T --mtbf 50700h"
    hourly, free = (
        campaign(f"{failing} --set training.checkpoint_interval=1h"),
        campaign(f"{failing} --checkpoint-seconds 0"),
    )
    assert hourly["checkpoint_interval_seconds"] == 3600 != hourly["best_interval_seconds"]
    assert hourly["goodput"] < campaign(failing)["goodput"] < free["goodput"]
    assert free["checkpoint_interval_seconds"] == pytest.approx(step)
    saving = campaign(f"{JOB} --tokens 1T --set training.checkpoint_interval=540s --checkpoint-seconds 60s")
    assert saving["goodput"] == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        (f"{JOB} --price 2.5/h", ["--price: has no effect without --tokens", "give --tokens 15T too"]),
        (f"{JOB} --mtbf 50700h", ["--mtbf: has no effect without --tokens"]),
        (f"{JOB} --tokens 1T --restart-seconds 60", ["--restart-seconds: has no effect without --mtbf", "50700h"]),
        (f"{JOB} --tokens 1T --checkpoint-seconds 60", ["--checkpoint-seconds: has no effect without --mtbf"]),
        (f"{JOB} --tokens 0", ["--tokens: '0' is not positive", "15T"]),
        (f"{JOB} --tokens -15T", ["--tokens: '-15T' is not positive"]),
        (f"{JOB} --tokens many", ["--tokens: 'many' is not a quantity", "15T"]),
        (f"{JOB} --tokens 15X", ["--tokens: '15X' has the unknown unit 'X'"]),
        (f"{JOB} --tokens 1e40", ["--tokens: '1e40' is out of range"]),
        (f"{JOB} --tokens 1T --price free", ["--price: 'free' is not a quantity", "2.5/h"]),
        (f"{JOB} --tokens 1T --price 0", ["--price: '0' is not positive"]),
        (f"{JOB} --tokens 1T --price -2/h", ["--price: '-2' is not positive"]),
        (f"{JOB} --tokens 1T --price 2.5/day", ["--price: '2.5/day' is not money per device-hour"]),
        (f"{JOB} --tokens 1T --mtbf 0h", ["--mtbf: '0h' is not positive", "50700h"]),
        (f"{JOB} --tokens 1T --mtbf inf", ["--mtbf: 'inf' is not a quantity"]),
        (f"{JOB} --tokens 1T --mtbf 9h --checkpoint-seconds=-1", ["--checkpoint-seconds: '-1' is not 0 or more"]),
        (f"{JOB} --tokens 1T --mtbf 16h --checkpoint-seconds 2h",
         ["--checkpoint-seconds: a checkpoint takes 2 h", "interrupted every 1 h:", "never finishes"]),
        (f"{JOB} --tokens 1T --mtbf 16h --restart-seconds 1h", ["--restart-seconds: a restart", "never finishes"]),
        (f"{JOB} --tokens 1T --mtbf 16h --set training.checkpoint_interval=1d",
         ["training.checkpoint_interval: only", "never finishes", "is best"]),
        (f"{JOB} --tokens 1T --mtbf 16h --set training.checkpoint_interval=1000d",
         ["training.checkpoint_interval: ", "never finishes", "checkpoint more often"]),
        (f"{JOB} --tokens 1T --checkpoint-seconds 1d --set training.checkpoint_interval=1s",
         ["training.checkpoint_interval: only", "save less often"]),
        (f"{JOB} --tokens 1T --mtbf 3s --checkpoint-seconds 0 --restart-seconds 0", ["--mtbf: a step takes"]),
        (f"{BARE} --tokens 1T --mtbf 50700h", ["--mtbf: needs the time of a checkpoint", "--checkpoint-seconds 30s"]),
    ],
)  # fmt: skip
def test_nonsense_is_refused_in_one_line(command: str, parts: list[str]) -> None:
    line = error_line(run(*shlex.split(command)))
    for part in parts:
        assert part in line


def test_a_cluster_without_storage_needs_only_the_time_of_a_checkpoint() -> None:
    assert 0 < campaign(f"{BARE} --tokens 1T --mtbf 50700h --checkpoint-seconds 30s")["goodput"] < 1
