"""The job of a request: keywords of the API, and no file whatever they name."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.running import run
from shardwise.api import analyze
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.ui.given import MOST_BYTES, arguments_from, command, document, fragment, job_of, keywords_of
from tables import table
from ui.serving import JOB

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 2048,
    "_name_or_path": "somebody/small",
}  # fmt: skip


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Every file under the current folder that is opened or looked for; it has a model and a cluster to be found."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "secret.json").write_text(json.dumps(CONFIG))
    (tmp_path / "secret.yaml").write_text("device: h100-sxm\nlevels: [{name: nvlink, size: 8, link: nvlink-4}]\n")
    monkeypatch.chdir(tmp_path)
    asked: list[str] = []
    before, kind = Path.open, Path.is_dir

    def noted(path: Path, *arguments: Any, **keywords: Any) -> Any:
        asked.append(str(path))
        return before(path, *arguments, **keywords)

    def looked(path: Path, **keywords: Any) -> bool:
        asked.append(str(path))
        return kind(path, **keywords)

    monkeypatch.setattr(Path, "open", noted)
    monkeypatch.setattr(Path, "is_dir", looked)
    yield asked
    assert [one for one in asked if "secret" in one or "passwd" in one] == []


@table(
    ("changed", "parts"),
    [
        ({"model": "secret.json"}, ["model: 'secret.json' is a file", "paste"]),
        ({"model": "secret"}, ["model: unknown model 'secret'"]),
        ({"model": "./secret"}, ["model: './secret' is a file"]),
        ({"model": "/etc/passwd"}, ["model: '/etc/passwd' is a file"]),
        ({"model": "..\\secret"}, ["is a file"]),
        ({"cluster": "secret.yaml"}, ["cluster: 'secret.yaml' is a file"]),
        ({"cluster": "secret.yaml:4"}, ["cluster: unknown cluster 'secret.yaml'"]),
        ({"cluster": "dgx-h100:4+secret.yaml:1"}, ["unknown cluster 'secret.yaml'"]),
        ({"cluster": {"kinds": ["dgx-h100", "secret.yaml"]}}, ["cluster.kinds: 'secret.yaml' is a file"]),
        ({"cluster": {"device": "secret.yaml", "levels": []}}, ["cluster.device: 'secret.yaml' is a file"]),
        ({"cluster": {"device": "h100-sxm", "levels": [{"name": "a", "size": 8, "link": "/etc/passwd"}]}},
         ["cluster.levels[0].link: '/etc/passwd' is a file"]),
        ({"cluster": {"device": "h100-sxm", "wiring": "secret"}}, ["cluster.wiring: 'secret' is a file"]),
        ({"stack": "secret.yaml"}, ["stack: 'secret.yaml' is a file"]),
        ({"model": None, "layers": 4, "hidden": 512, "device": "secret.yaml"}, ["device: 'secret.yaml' is a file"]),
        ({"run": {"folder": "secret"}}, ["run: is how a job runs"]),
        ({"job": "secret.yaml"}, ["job: is not a keyword of a job"]),
        ({"fields": {"model": "secret.json"}}, ["fields.model: 'secret.json' is a file"]),
    ],
)  # fmt: skip
def test_no_request_reads_a_file(changed: dict[str, Any], parts: list[str], opened: list[str]) -> None:
    with pytest.raises(SpecError) as error:
        job_of({**JOB, **changed})
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_a_preset_is_read_all_the_same(opened: list[str]) -> None:
    assert job_of(JOB)[0].model.layers == 80
    assert job_of({**JOB, "cluster": "dgx-h100:4+dgx-h100:4", "tp": 8, "pp": 2})[0].cluster.devices == 64


def test_a_pasted_config_is_the_model(opened: list[str]) -> None:
    job, _ = job_of({"model": CONFIG, "cluster": "dgx-h100", "global_batch": 16, "seq": 2048})
    assert (job.model.name, job.model.layers, job.model.hidden) == ("small", 4, 512)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "malformed JSON"),
        (b"{", "malformed JSON"),
        (b"[1]", "is not an object"),
        (b'{"tp": NaN}', "NaN is not a JSON number"),
        (b'{"tp": 1e999}', None),
        (b'{"tp": ' + b"9" * 5000 + b"}", "more than 300 digits"),
        (b'{"a":' * 150 + b"1" + b"}" * 150, "levels deep"),
        (b"[" * 200_000, "levels deep"),
        (b'{"model": "\xed\xa0\x80"}', "not text in UTF-8"),
        (b'{"model": {"model_type": "llama", "_name_or_path": "\\ud800"}}', "half a character"),
    ],
)
def test_what_is_no_document_is_refused_in_one_line(body: bytes, said: str | None) -> None:
    with pytest.raises(SpecError) as error:
        job_of(document(body) if said is not None else {**JOB, **document(body)})
    assert (said or "tp") in str(error.value) and len(str(error.value)) < 300
    assert len(body) < MOST_BYTES


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "given",
    [
        JOB,
        {
            **JOB,
            "tp": 4,
            "cp": 2,
            "context_method": "all-gather",
            "stage_layers": "balanced",
            "order": ["tp", "cp", "pp", "dp"],
        },
        {**JOB, "offload": {"optimizer": 1.0}, "zero": 1, "precision": "bf16-fp32-grads", "sequence_parallel": False},
        {**JOB, "memory_risk": 0.3, "attention": "unfused"},
        {**JOB, "stack": "megatron-core", "schedule": "interleaved", "interleave": 4, "recompute": "selective"},
        {**JOB, "stack": "nanotron", "tp": 4, "cp": 2, "overlap": {"cp": True}},  # which that stack does not
        {
            "model": "mixtral-8x7b",
            "cluster": "dgx-h100:4",
            "ep": 8,
            "global_batch": "1M-tokens",
            "seq": 4096,
            "zero": 3,
        },
    ],
)
def test_keywords_link_and_command_give_the_same_job(given: dict[str, Any]) -> None:
    job, _ = job_of(given)
    again, _ = job_of(keywords_of(job))
    assert again == job and isinstance(job, Job)
    assert "#" not in fragment(given) and " " not in fragment(given)
    words = shlex.split(command(given))
    printed = run(*words[1:], "--json")
    assert words[:2] == ["shardwise", "analyze"] and printed.status in (0, 1), printed.err
    assert json.loads(printed.out) == json.loads(json.dumps(analyze(arguments_from(given)).to_dict()))


VISION = {"model_type": "gemma3", "text_config": {**CONFIG, "model_type": "llama"}, "vision_config": {"hidden_size": 8}}


def test_a_vision_model_is_its_language_model_and_says_so(tmp_path: Path) -> None:
    small = {"cluster": "dgx-h100", "global_batch": 16, "seq": 2048}
    job, notes = job_of({"model": VISION, **small})
    assert job.model.layers == 4
    said = "'gemma3': only its language model (text_config) is read, nothing else (vision_config)"
    assert notes == [said]
    (tmp_path / "config.json").write_text(json.dumps(VISION))
    printed = run("analyze", "--model", str(tmp_path), "--cluster", "dgx-h100", "--global-batch", "16", "--seq", "2048")
    assert printed.status == 0 and said in printed.err


@table(
    ("changed", "words"),
    [
        ({"model": CONFIG}, "--model config.json --cluster dgx-h100:8"),
        ({"model": {"layers": 4, "hidden": 512, "heads": 8, "vocab": 1000}}, "job.yaml"),
        ({"cluster": {"device": "h100-sxm", "levels": []}}, "job.yaml"),
        ({"cluster": {"kinds": ["dgx-h100:4", "dgx-a100:4"]}}, "--cluster dgx-h100:4+dgx-a100:4"),
        ({"cluster": {"kinds": ["dgx-h100:4", "dgx-a100:4"], "link": "ethernet-100g"}}, "job.yaml"),
    ],
)
def test_a_command_names_only_files_that_there_are(changed: dict[str, Any], words: str) -> None:
    """The config.json that was pasted, and the job.yaml that the page saves."""
    assert words in command({**JOB, **changed})
