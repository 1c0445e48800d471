"""A new field touches one dataclass: everything that names fields follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
_AFTER = '    """Tokens per sequence."""\n'
_FIELD = '''    label_smoothing: Literal["none", "some", "much"] = setting("none", flag="--label-smoothing")
    """How much of a label's weight its neighbours get. Not priced."""
'''
_ASK = """
import contextlib, importlib.util, io, json, sys
from shardwise.api import analyze
from shardwise.cli.main import main
from shardwise.ui.given import command

def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue()

spec = importlib.util.spec_from_file_location("make_fields", sys.argv[1])
make_fields = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_fields)
job = {"model": "tiny", "cluster": "laptop", "label_smoothing": "some"}
flags = ["--model", "tiny", "--cluster", "laptop", "--label-smoothing"]
print(json.dumps({
    "help": printed("analyze", "--help"),
    "job": analyze(**job).job.to_dict(),
    "flagged": printed("analyze", *flags, "some", "--json"),
    "refused": main(["analyze", *flags, "more"]),
    "schema": json.loads(printed("list", "schema")),
    "bash": printed("completion", "bash"),
    "command": command(job),
    "keywords": dict(make_fields.keywords()),
    "table": list(make_fields.table(make_fields.Training)),
}))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each surface says in a copy of the sources that has one field more."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    training = copy / "src" / "shardwise" / "spec" / "training.py"
    text = training.read_text(encoding="utf-8")
    assert _AFTER in text
    training.write_text(text.replace(_AFTER, _AFTER + _FIELD), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(ROOT / "docs" / "make_fields.py")],
        env={**os.environ, "PYTHONPATH": str(copy / "src"), "COLUMNS": "200"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    assert "--label-smoothing: 'more' is not a choice" in done.stderr
    return said


def test_it_is_a_flag_with_help_and_a_keyword(answers: dict[str, Any]) -> None:
    line = next(line for line in str(answers["help"]).splitlines() if "--label-smoothing" in line)
    assert line.endswith("how much of a label's weight its neighbours get (none, some, much)")
    assert answers["job"]["training"]["label_smoothing"] == "some"
    assert '"label_smoothing": "some"' in str(answers["flagged"])
    assert answers["refused"] == 2
    assert answers["keywords"]["label_smoothing"] == "str"


def test_it_is_in_the_schema_the_completion_the_page_and_its_command(answers: dict[str, Any]) -> None:
    in_schema = answers["schema"]["$defs"]["Training"]["properties"]["label_smoothing"]
    assert in_schema["enum"] == ["none", "some", "much"]
    assert in_schema["description"] == "How much of a label's weight its neighbours get. Not priced."
    assert '"analyze --label-smoothing"' in str(answers["bash"])
    assert "--label-smoothing some" in str(answers["command"])
    row = next(row for row in answers["table"] if "label_smoothing" in row)
    assert row.startswith("| `label_smoothing` | `--label-smoothing` | `none` | How much of a label's weight")
