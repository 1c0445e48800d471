"""`shardwise verify` as a user runs it."""

from __future__ import annotations

import json

import pytest

from cli.running import run

TINY = "verify --model tiny --global-batch 4 --seq 32"


def test_a_layout_that_is_right() -> None:
    result = run(*f"{TINY} --cluster laptop:2 --tp 2 --json --steps 1".split())
    assert result.status == 0, result.err
    found = json.loads(result.out)
    assert found["ok"] is True and found["steps"] == 1
    assert set(found["worst"]) == {"loss", "gradient", "weight", "gradient_norm"}
    assert max(found["worst"].values()) < 1e-5 and found["where"]


def test_beyond_the_tolerance_the_status_is_one() -> None:
    result = run(*f"{TINY} --cluster laptop:2 --tp 2 --tolerance 1e-12 --steps 1".split())
    assert result.status == 1 and "DIFFERS" in result.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cluster laptop:3 --tp 3", "--tp: 3 does not divide 8 query heads"),
        ("--cluster laptop:2 --pp 2 --schedule dualpipe", "schedule: dualpipev"),
        ("--cluster laptop:2 --tp 2 --run-device cuda", "--run-device: cuda"),
        ("--cluster laptop:2 --steps 0", "--steps: 0; use 1 or more"),
        ("--cluster laptop:2 --seed 99999999999999", "--seed: 99999999999999 is out of range"),
        ("--cluster laptop:2 --tolerance nan", "--tolerance: nan is not a finite number"),
        ("--cluster laptop:2 --tolerance=-1", "--tolerance: -1 is not a deviation"),
        (
            '--cluster laptop:2 --set strategy.offload={"optimizer":1,"target":"nvme","folder":"/no/where"}',
            "strategy.offload.folder: /no/where: No such file or directory",
        ),
        ("--cluster laptop:16 --tp 2 --pp 2 --cp 2 --dp 2 --global-batch 32", "use --max-processes 16"),
    ],
)
def test_what_cannot_be_run_is_said_in_one_line(arguments: str, message: str) -> None:
    result = run(*f"{TINY} {arguments}".split())
    assert result.status == 2 and message in result.err and len(result.err.strip().splitlines()) == 1


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from shardwise.report.measured import verification_progress

    done = iter((0, 2, 2, 2, 2, 2, 2, 2))
    for shown, terminal in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr("sys.stderr.isatty", lambda terminal=terminal: terminal)
        with verification_progress(3, shown) as watch:
            watch("two processes", lambda: next(done, 2))
        out, err = capfd.readouterr()
        assert out == ""
        assert ("two processes" in err) == (shown and terminal)


def test_a_model_too_large_for_this_machine_is_refused() -> None:
    result = run(
        *[
            "verify",
            "--model",
            "llama3-405b",
            "--cluster",
            "laptop:2",
            "--tp",
            "2",
            "--global-batch",
            "4",
            "--seq",
            "32",
        ]
    )
    assert result.status == 2 and "iB here" in result.err and "--shrink" in result.err
    assert len(result.err.strip().splitlines()) == 1
