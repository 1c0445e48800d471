"""Every example of docs/integrations.md runs, in the order of the page, in an empty folder."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise import SpecError, validate
from shardwise.integrations.layout import WatchOptions

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.slow
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


# Of every row of the table "What was run" the cases of the workers beside this file that run it.
RUN = {
    "DDP": ["plain", "trainer-plain"],
    "FSDP2": ["fsdp2", "trainer-kept", "sharded"],
    "FSDP2, parameters kept; recomputed": ["fsdp2-kept", "fsdp2-recomputed", "trainer-kept"],
    "FSDP2, bf16; activations offloaded; `sync_each_batch`": ["fsdp2-bf16", "fsdp2-recomputed", "fsdp2-each-batch"],
    "FSDP2, hybrid (`dp_replicate_size` × `dp_shard_size`)": ["hybrid"],
    "FSDP1, FULL_SHARD": ["fsdp1", "trainer-fsdp1"],
    "FSDP1, SHARD_GRAD_OP; bf16; wrapped by hand": ["fsdp1-zero2", "fsdp1-bf16", "fsdp1-by-hand"],
    "tp, or FSDP2, by `from_pretrained`": ["tp", "trainer-tp", "trainer-loaded"],
    "tp by `parallelize_module`": ["lightning-tp"],
    "DeepSpeed ZeRO-1, 2, 3 (`make test-frameworks`)": ["trainer-deepspeed"],
}


KINDS = {"sharded": "Lightning", "lightning": "Lightning", "trainer": "Trainer"}


def test_the_table_of_what_was_run_names_what_the_workers_run() -> None:
    workers = "".join(one.read_text(encoding="utf-8") for one in Path(__file__).parent.glob("*_worker.py"))
    known = {*re.findall(r'^    "([\w-]+)": ', workers, re.MULTILINE), "sharded", "trainer-deepspeed"}
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$", TEXT.partition("## What was run")[2], re.MULTILINE)
    table = {name: cells for name, *cells in rows[1:] if cells[0] in ("run", "read", "–")}
    assert len(table) == 13
    for name, cells in table.items():
        cases = set(RUN.get(name, []))
        assert cases <= known
        kinds = {KINDS.get(one.partition("-")[0], "loop") for one in cases}
        run = {kind for kind, cell in zip(("loop", "Trainer", "Lightning"), cells, strict=True) if cell[:3] == "run"}
        assert run == kinds, name


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
