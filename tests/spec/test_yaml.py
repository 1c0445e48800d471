"""Job files: written and read without loss, with a user's own files wherever a preset name stands."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from effort import examples
from shardwise.accuracy.table import read_table
from shardwise.interop.frameworks import read_text
from shardwise.interop.huggingface import read_config
from shardwise.interop.jobs import read_job
from shardwise.spec import Cluster, Device, Job, Link, Model, SpecError, presets
from shardwise.spec.errors import shown
from shardwise.spec.files import bounded_lines, parse_json, parse_toml, parse_yaml, read_yaml
from spec.jobs import jobs

DEVICE = "peak: {bf16: 100TFLOPS}\nmemory: 24GiB\nmemory_bandwidth: 1TB/s\n"
LINK = "bandwidth: 12GB/s\nlatency: 3us\n"
MODEL = "layers: 4\nhidden: 64\nheads: 4\nffn: 256\nvocab: 1000\n"


@settings(deadline=None, max_examples=examples(150), suppress_health_check=[HealthCheck.too_slow])
@given(jobs())
def test_a_job_survives_the_file(job: Job) -> None:
    assert Job.from_yaml(job.to_yaml()) == job


def test_presets_stay_names_in_a_job_file() -> None:
    job = Job(model="llama3-8b", cluster="dgx-h100:4", training={"global_batch": 64})  # type: ignore[arg-type]
    text = job.to_yaml()
    assert parse_yaml(text) == {
        "model": "llama3-8b",
        "cluster": "dgx-h100:4",
        "strategy": {"dp": 32},
        "training": {"global_batch": 64},
    }


@pytest.mark.parametrize("name", ["tpu-v5p:8x8x16", "gb200-nvl72:3", "two-datacenters:8", "laptop", "dgx-a100"])
def test_a_sized_cluster_keeps_its_short_name(name: str) -> None:
    job = Job(model="llama3-8b", cluster=name, training={"global_batch": "1M-tokens"})  # type: ignore[arg-type]
    assert job.to_dict()["cluster"] == name


def write_parts(folder: Path) -> None:
    """A device, a link, a cluster that names both, and a model; each its own file."""
    (folder / "device.yaml").write_text(DEVICE)
    (folder / "link.yml").write_text(LINK)
    (folder / "model.yaml").write_text(MODEL)
    (folder / "cluster.yaml").write_text(
        f"device: {folder}/device.yaml\nlevels:\n  - {{size: 8, link: {folder}/link.yml}}\nhost_link: pcie-4\n"
    )


def test_own_files_stand_where_preset_names_stand(tmp_path: Path) -> None:
    write_parts(tmp_path)
    job = Job.from_dict({"model": str(tmp_path / "model.yaml"), "cluster": str(tmp_path / "cluster.yaml"),
                         "training": {"global_batch": 8}})  # fmt: skip
    assert job.model == Model.from_dict({**parse_yaml(MODEL), "name": "model"})
    assert job.cluster.device == Device.from_dict({**parse_yaml(DEVICE), "name": "device"})
    assert job.cluster.levels[0].link == Link.from_dict({**parse_yaml(LINK), "name": "link"})
    assert job.cluster.host_link == presets.load("link", Link, "pcie-4")
    assert Job.from_yaml(job.to_yaml()) == job


def test_a_job_file_finds_model_and_cluster_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, elsewhere = tmp_path / "job", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    write_parts(folder)
    (folder / "job.yaml").write_text("model: model.yaml\ncluster: cluster.yaml\ntraining: {global_batch: 8}\n")
    monkeypatch.chdir(elsewhere)
    assert read_job(folder / "job.yaml").model.name == "model"
    monkeypatch.chdir(tmp_path)
    assert read_job("job/job.yaml").cluster.name == "cluster"


def test_a_cluster_file_finds_its_device_and_links_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "device.yaml").write_text(DEVICE)
    (tmp_path / "link.yaml").write_text(LINK)
    (tmp_path / "cluster.yaml").write_text("device: device.yaml\nlevels: [{size: 8, link: link.yaml}]\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    cluster = presets.load("cluster", Cluster, str(tmp_path / "cluster.yaml"))
    assert (cluster.device.name, cluster.levels[0].link and cluster.levels[0].link.name) == ("device", "link")


def test_an_own_file_may_be_sized(tmp_path: Path) -> None:
    write_parts(tmp_path)
    text = (tmp_path / "cluster.yaml").read_text().replace("levels:\n", "levels:\n  - {size: 4, link: pcie-5}\n")
    (tmp_path / "cluster.yaml").write_text(text)
    training = {"seq": 1024, "global_batch": 24}
    job = Job.from_dict({"model": "gpt2", "cluster": f"{tmp_path}/cluster.yaml:6", "training": training})
    assert job.cluster.devices == 24


def refused(text: str | bytes, folder: Path) -> SpecError:
    path = folder / "job.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SpecError) as caught:
        read_job(path)
    assert len(str(caught.value).splitlines()) == 1
    return caught.value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: a\ncluster: b\nmodel: c\n", "key 'model' twice, line 3"),
        ("training: {seq: 1, seq: 2}\n", "key 'seq' twice, line 1"),
        ("model: [unclosed\n", "line 2"),
        ("a:\n\tb: 1\n", "line 2"),
        ("a: b: c\n", "line 1, column 5"),
        ("- just\n- a list\n", "has no fields"),
        ("", "has no fields"),
        ("model: !!python/object/apply:os.system ['true']\n", "could not determine a constructor"),
        ("a: *nowhere\n", "undefined alias"),
        ("[" * 100_000, "nested more than 100 levels deep"),
        ("[" * 900 + "]" * 900, "nested more than 100 levels deep"),
        ("\n".join(" " * i + "a:" for i in range(900)), "nested more than 100 levels deep"),
        ("".join(f"k{i}: 1\n" for i in range(150_000)), "more than 100,000 values"),
        ("? [1, 2]\n: 3\n", "a key should be text line 1"),
        ("model: !!int abc\n", "'abc' is not a whole number line 1"),
        ("model: 2020-99-99\n", "'2020-99-99' is not a date line 1"),
        ("model: {layers: " + "9" * 5000 + "}\n", "has more than 300 digits line 1"),
        ("model: {layers: 0x" + "f" * 290 + "}\n", "has more than 300 digits line 1"),
        ("model: {layers: " + ":".join(["59"] * 300_000) + "}\n", "has more than 300 digits line 1"),
        ("model: gpt2\n---\nmodel: gpt2\n", "malformed YAML"),
        (b"\xff\xfe\x00bad", "cannot be read (not text in UTF-8)"),
        (b"name: \x80\n", "cannot be read (not text in UTF-8)"),
        ("a: \x07\n", "malformed YAML"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_malformed_file_is_one_line_with_the_place(text: str | bytes, said: str, tmp_path: Path) -> None:
    error = refused(text, tmp_path)
    assert "job.yaml" in str(error)
    assert said in str(error)
    assert error.remedy


def test_aliases_that_explode_or_hold_themselves_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    merged = ["a0: &a0 {x: 1}", *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, 13))]
    for text in ("\n".join(lines), "\n".join(merged), "model: &m [*m]\n", "model: &m {<<: *m}\n"):
        assert "aliases make it more than 100,000 values" in refused(text, tmp_path).problem


def test_aliases_that_nest_without_end_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]", *(f"a{i}: &a{i} [*a{i - 1}]" for i in range(1, 150))]
    assert "aliases nest it more than 100 levels deep" in refused("\n".join(lines), tmp_path).problem


DEEP = 600
TOO_MUCH: dict[str, dict[Callable[..., Any], list[Any]]] = {
    "nested more than 100 levels deep": {
        parse_json: ["[" * DEEP + "]" * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP, "[" * 10**6],
        parse_toml: ["a = " + "[" * 150 + "]" * 150, "a = " + "[" * 10**6],
    },
    "more than 100,000 values": {
        parse_json: ["[" + "1," * 150_000 + "1]"],
        parse_toml: ["a = [" + "1," * 150_000 + "]"],
    },
    "a number of more than 300 digits": {
        parse_json: ['{"a": [' + "9" * digits + "]}" for digits in (301, 5000)],
        parse_toml: ["a = " + "9" * 301, "a = " + "9" * 5000, "a = 0x" + "f" * 5000],
    },
    "half a character": {parse_json: [r'{"a": "\ud800 x"}', r'{"\udc00": 1}', r'["\ud83d\ude00", "\uDFFF"]']},
    "not text in UTF-8": {parse_json: [b'{"a": "\xff"}', b"\x80"]},
}


@pytest.mark.parametrize("said", TOO_MUCH)
def test_json_and_toml_have_the_same_limits(said: str) -> None:
    for parse, texts in TOO_MUCH[said].items():
        for text in texts:
            with pytest.raises(SpecError, match=said) as caught:
                parse(text, "it")
            assert len(str(caught.value)) < 200


def test_within_its_limits_a_document_is_what_it_says() -> None:
    assert parse_json(r'["\ud83d\ude00", 1e300, NaN]')[0] == "😀"
    assert parse_json("[" * 100 + "]" * 100) and parse_json("9" * 300) == int("9" * 300)
    with pytest.raises(SpecError, match="NaN is not a JSON number"):
        parse_json("[NaN]", finite=True)


@pytest.mark.parametrize("value", [10**5000, -(10**5000), [[10**5000]]], ids=["large", "small", "inside"])
def test_an_error_shows_any_value(value: Any) -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    assert shown(value).startswith("this ") and shown(deep) == "this list"


def test_a_line_without_end_takes_no_memory() -> None:
    text = b"a\n" + b"b" * 3000 + b"\n\nc"
    assert list(bounded_lines(io.BytesIO(text), 10)) == [b"a\n", None, b"\n", b"c"]
    assert list(bounded_lines(io.BytesIO(b"b" * 10), 10)) == [b"b" * 10]
    assert list(bounded_lines(io.BytesIO(b"b" * 11), 10)) == [None]


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_that_never_ends_is_no_file(device: str) -> None:
    readers: list[Callable[[str], object]] = [read_yaml, read_text, lambda path: read_config(Path(path))]
    for read in (*readers, lambda path: read_table(path, (), "runs")):
        with pytest.raises(SpecError, match=r"larger than|too large|not text|not JSON|not a CSV"):
            read(device)


def test_what_is_not_there_is_named_as_in_a_file(tmp_path: Path) -> None:
    assert str(refused("model: {~: 1}\ncluster: laptop\n", tmp_path)).startswith("model.null: unknown field")
    fields = MODEL.replace("layers: 4", "layers: ~").replace("\n", ", ")
    assert "layers: null is not a whole number" in str(refused(f"model: {{{fields}}}\ncluster: laptop\n", tmp_path))
    (tmp_path / "empty.yaml").write_text("")
    with pytest.raises(SpecError, match=r"empty.yaml: has no fields; it should describe a model"):
        Job.from_dict({"model": str(tmp_path / "empty.yaml"), "cluster": "laptop"})


def test_a_file_that_is_not_there_a_folder_and_one_too_large(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="is not there; check the path"):
        read_job(tmp_path / "none.yaml")
    with pytest.raises(SpecError, match="is a folder; name the file inside it"):
        read_job(tmp_path)
    large = tmp_path / "large.yaml"
    with large.open("wb") as file:
        file.truncate(17 * 2**20)
    with pytest.raises(SpecError, match="is larger than 16 MiB"):
        read_yaml(large)


def test_an_error_in_an_own_file_names_the_file_and_the_field(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MODEL.replace("heads: 4", "heads: four"))
    with pytest.raises(SpecError) as caught:
        Job.from_dict({"model": str(tmp_path / "mine.yaml"), "cluster": "laptop"})
    assert caught.value.field == "model.mine.yaml.heads"
    assert "'four'" in caught.value.problem


def test_a_key_merged_by_alias_may_be_overridden() -> None:
    assert parse_yaml("base: &b {x: 1, y: 2}\nown: {<<: *b, y: 3}\n")["own"] == {"x": 1, "y": 3}


@pytest.mark.parametrize("name", ["\x85", "a\u2028b", "\u2029", "\xa0", "中文", "\ufeff"])
def test_names_with_unicode_line_breaks_survive(name: str) -> None:
    shape = {"layers": 2, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 8, "name": name}
    job = Job.from_dict({"model": shape, "cluster": "laptop"})
    assert Job.from_yaml(job.to_yaml()) == job
