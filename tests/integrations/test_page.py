"""Every example of docs/integrations.md runs, in the order of the page, in an empty folder."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import SpecError, validate
from shardwise.integrations.price import WatchOptions

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_the_examples_run_and_are_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for example in EXAMPLES:
        exec(compile(example, str(PAGE), "exec"), names)
    assert len(EXAMPLES) == 4
    scores = validate(tmp_path)
    assert [one.row_id for one in scores.rows] == ["out/shardwise", "shardwise", "watched"]
    assert not scores.not_scored and all(one.assumed == () for one in scores.rows)


def test_every_option_and_figure_is_on_the_page() -> None:
    options = re.findall(r"^\| `(\w+)`", TEXT.partition("## What they take")[2], re.MULTILINE)
    assert set(WatchOptions.__dataclass_fields__) == {name for name in options if name in WatchOptions.__annotations__}
    source = (PAGE.parents[1] / "src/shardwise/integrations/watch.py").read_text(encoding="utf-8")
    logged = re.findall(r'^            "(\w+)": .*,$', source.partition("named = {")[2].partition("}")[0], re.MULTILINE)
    assert re.findall(r"`shardwise/(\w+)`", TEXT) == logged


@pytest.mark.parametrize(("module", "needs"), [("huggingface", "accelerate"), ("lightning", "lightning")])
def test_a_framework_that_is_missing_is_one_line(module: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"shardwise.integrations.{module}"
    for one in ("accelerate", "lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, one, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(SpecError, match=f"^{name}: needs the package {needs}, which is not installed; pip install"):
        importlib.import_module(name)


def test_a_folder_without_runs_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="has no run's folder in it; name the folder of a run"):
        validate(tmp_path)
