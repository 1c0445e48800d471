"""Every example of docs/api.md runs, in the order of the page, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(compile(example, str(PAGE), "exec"), names)
    assert len(EXAMPLES) == 9


def test_every_verb_is_on_the_page() -> None:
    from shardwise.api import VERBS

    examples = "".join(EXAMPLES)
    assert [verb for verb in VERBS if f"shardwise.{verb}(" not in examples] == [
        "plan_mixed",
        "finetune",
    ]  # that needs a model's folder
