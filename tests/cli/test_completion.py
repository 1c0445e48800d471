"""Completion of the command line, asked of bash itself."""

from __future__ import annotations

import contextlib
import io
import shutil
import subprocess

import pytest

from shardwise.cli.main import VERBS, main
from shardwise.spec.fields import job_fields

_ASK = """
{script}
COMP_WORDS=({words} "{last}")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shardwise
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def printed(shell: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["completion", shell]) == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def bash() -> str:
    return printed("bash")


def completed(line: str, script: str) -> list[str]:
    """What bash offers for the last word of ``line``."""
    *words, last = line.split(" ")
    asked = _ASK.format(script=script, words=" ".join(words), last=last)
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardwise pl", ["plan"]),
        ("shardwise ", list(VERBS)),
        ("shardwise analyze --zer", ["--zero"]),
        ("shardwise analyze --zero ", ["0", "1", "2", "3"]),
        ("shardwise plan --precision bf16", ["bf16", "bf16-fp32-grads"]),
        ("shardwise train --microbatch ", ["auto"]),
        ("shardwise analyze --model llama3-4", ["llama3-405b"]),
        ("shardwise plan --pareto m", ["memory", "money"]),
        ("shardwise data bui", ["build"]),
        ("shardwise explain zer", ["zero"]),
        ("shardwise bench parameter-server --worker", ["--workers"]),
        ("shardwise analyze --no-such", []),
        (f"shardwise analyze {__file__[:-1]}", [__file__]),
        (f"shardwise analyze --model {__file__[:-1]}", [__file__]),
    ],
)
def test_bash_completes_verbs_flags_values_and_files(line: str, offered: list[str], bash: str) -> None:
    assert completed(line, bash) == offered


def test_every_flag_of_the_table_is_completed(bash: str) -> None:
    flags = {record.flag for record in job_fields().values() if record.flag}
    assert flags <= set(completed("shardwise analyze --", bash))


@pytest.mark.parametrize(("shell", "holds"), [("zsh", "--zero"), ("fish", "-l zero -x -a '0 1 2 3' -d 'ZeRO stage")])
def test_other_shells_have_the_same_words(shell: str, holds: str) -> None:
    text = printed(shell)
    assert holds in text
    if shutil.which(shell) is not None:
        check = subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, capture_output=True, check=False)
        assert check.returncode == 0, check.stderr
