"""Checkpoints and data in an object store: the same states as on a disk, whole or not there, every fault named."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from cli.running import error_line, run, run_json
from engine.workers import on_ranks
from run.storage.object_store import BUCKET, ObjectServer, StoreFault, object_server
from shardwise.run.checkpoint.checkpoint_folder import RemoteCheckpointFolder
from shardwise.run.checkpoint.folder import checkpoint_folder
from shardwise.run.checkpoint.manifest import Manifest, read_manifest
from shardwise.run.data.order import Stream
from shardwise.run.data.token_files import RemoteArray, open_pair
from shardwise.run.storage import fsspec_store, stores
from shardwise.run.storage.place import BlockCache, BlockReader, RemotePlace, place_of
from shardwise.run.storage.stores import StoreError
from shardwise.spec.errors import SpecError
from shardwise.training.checkpoint.load import problems_of
from shardwise.training.checkpoint.save import draft_of
from shardwise.training.checkpoint.shards import Entry, ShardReader
from training.faults import SETTINGS, STEPS, small_job, train
from training.faulty_worker import Fault
from training.runs import VOCAB, boxes, job_of, whole, write_shards
from training.runs import run as run_in_pool

SUFFIXES = (".bin", ".idx", ".sums.json")


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectServer]:
    with object_server() as found, mock.patch.object(fsspec_store, "FIRST_WAIT_SECONDS", 0.01):
        yield found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_shards(tmp_path_factory.mktemp("data") / "words")


@pytest.fixture
def memory() -> RemotePlace:
    """A store of this process alone, for what needs no server."""
    place = place_of("memory://here/checkpoints")
    assert isinstance(place, RemotePlace)
    place.store.delete(str(place / name) for name in place.objects())
    return place


def upload(source: Path, place: RemotePlace) -> None:
    for file in source.rglob("*"):
        if file.is_file() and not file.name.startswith("."):
            (place / str(file.relative_to(source))).write_bytes(file.read_bytes())


def remote(uri: str) -> RemotePlace:
    place = place_of(uri)
    assert isinstance(place, RemotePlace)
    return place


# -- places ------------------------------------------------------------------------------------------


def test_paths_stay_paths(shards: str, tmp_path: Path) -> None:
    """Also as URIs; fsspec is not even imported for them."""
    code = f"""
import sys
from shardwise.run.checkpoint.folder import checkpoint_folder
from shardwise.run.data.token_files import check_sums, open_pair
open_pair({shards!r}), check_sums("file://" + {shards!r})
with checkpoint_folder("file://{tmp_path}/checkpoints").locked() as _:
    assert checkpoint_folder({str(tmp_path / "checkpoints")!r}).committed() == []
assert not {{"fsspec", "s3fs", "torch"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert place_of(f"file://{tmp_path}/a%20b") == tmp_path / "a b"
    assert place_of("runs/job") == Path("runs/job") and place_of("C:x") == Path("C:x")
    assert str(place_of("s3://bucket/run/") / "x") == "s3://bucket/run/x"
    assert isinstance(checkpoint_folder(f"file://{tmp_path}").path, Path)


def test_a_cache_holds_as_many_bytes_as_it_may(memory: RemotePlace) -> None:
    content = bytes(range(250)) * 40
    (memory / "object").write_bytes(content)
    cache = BlockCache(3_000)
    reader = BlockReader(memory / "object", len(content), 1_000, cache)
    for first, last in ((0, 10), (999, 1_001), (2_500, 7_777), (9_990, 20_000), (5, 5)):
        assert reader.read(first, last) == content[first:last]
        assert cache.held_bytes <= 3_000
    with mock.patch.object(RemotePlace, "read_range", side_effect=AssertionError("it is in the cache")):
        assert reader.read(9_500, 10_000) == content[9_500:]


# -- checkpoints -------------------------------------------------------------------------------------


def manifest_of(step: int, files: dict[str, Any]) -> Manifest:
    return Manifest(step, {"model": "tiny"}, {}, {}, files)


def test_a_checkpoint_is_whole_or_not_there(memory: RemotePlace) -> None:
    """Shards without a manifest are nothing; what replaces a checkpoint leaves only its own; the oldest go."""
    folder = checkpoint_folder(memory)
    assert isinstance(folder, RemoteCheckpointFolder)
    values = [torch.arange(6.0).reshape(2, 3)]

    def written(step: int, name: str, *, commit: bool = True) -> None:
        draft = draft_of(folder, step, name)
        file = draft.file_name(0)
        shard = draft.write(file, [Entry("x", torch.float32, (2, 3))], lambda: values)
        draft.announce(0, shard)
        assert draft.announced(0) == shard and draft.announced(1) is None
        if commit:
            draft.commit(manifest_of(step, {file: shard}))
        else:
            draft.announce(1, OSError(28, "No space left on device"))
            assert draft.announced(1) == "No space left on device"

    written(3, "0000aaaa-1", commit=False)
    assert folder.present() == [3] and folder.committed() == []
    folder.clear_unfinished()
    assert folder.present() == [] and memory.objects() == {}
    for step in (1, 2, 3, 4):
        written(step, f"0000bbbb-{step}")
    written(4, "0000cccc-1")
    assert set(folder.of_step(4).objects()) == {"manifest.json", "shard-00000.0000cccc-1.safetensors"}
    found = ShardReader(folder.of_step(4)).slice_of(
        "shard-00000.0000cccc-1.safetensors", "x", (2, 3), (slice(1, 2), slice(0, 2))
    )
    assert found.tolist() == [[3.0, 4.0]]
    folder.retain(1, every=2)
    assert folder.present() == folder.committed() == [4, 2]


def test_a_run_that_was_taken_over_commits_nothing(memory: RemotePlace, tmp_path: Path) -> None:
    folders = [checkpoint_folder(memory, tmp_path / name) for name in ("first", "second")]
    with folders[0].locked():
        draft_of(folders[0], 1, "00000000-1").commit(manifest_of(1, {}))
        with folders[1].locked():
            draft_of(folders[1], 2, "00000000-1").commit(manifest_of(2, {}))
            with pytest.raises(SpecError, match=r"belongs to the run in .*second on .* now, which was started later"):
                draft_of(folders[0], 3, "00000000-2").commit(manifest_of(3, {}))
    assert folders[0].committed() == [2, 1]
    with folders[0].locked(), pytest.raises(SpecError, match="is training in it"), folders[0].locked():
        pass


def trained(job: Any, folder: str, environment: dict[str, str]) -> dict[str, Any]:
    """Loads the newest checkpoint of a folder in the layout of a job; these processes are older than the server."""
    os.environ.update(environment)
    from shardwise.engine.engine import Engine
    from shardwise.training.checkpointing import load_newest

    engine = Engine(job, seed=9)
    state = load_newest(engine, checkpoint_folder(folder))
    assert state is not None
    return {"boxes": boxes(engine), "step": state.position.step}


def final(folder: str) -> tuple[Any, ...]:
    """A run's end, to the last bit, whatever its files are called."""
    manifest = read_manifest(place_of(folder) / f"step-{STEPS:08d}")
    return [manifest.files[name] for name in sorted(manifest.files)], manifest.numbers, sorted(manifest.tensors)


@pytest.mark.slow
def test_a_killed_run_in_a_store_equals_an_undisturbed_one_on_a_disk(
    server: ObjectServer, shards: str, tmp_path: Path
) -> None:
    """Data and checkpoints are in the store, which fails, is slow and loses a part; a rank is killed; then the folder
    of the run is lost too, and another layout goes on.
    """
    run_in_pool(small_job(shards), tmp_path / "undisturbed")
    for suffix in SUFFIXES:
        remote(server.uri(f"data/words{suffix}")).write_bytes(Path(shards + suffix).read_bytes())
    uri = server.uri("killed")
    job = small_job(
        server.uri("data/words"), run={"checkpoints": {**SETTINGS["checkpoints"], "folder": uri}, "steps": STEPS}
    )
    faults = (
        StoreFault("PUT", r"killed/step-\d+/shard", "500", times=2),
        StoreFault("PUT", r"killed/step-\d+/shard", "lose"),
        StoreFault("GET", r"words\.bin", "slow"),
        StoreFault("GET", r"words\.bin", "short"),
    )
    with server.failing(*faults):
        ended = train(job, tmp_path / "killed", Fault("kill", "backward", 5, 1))
    ended.require(0, "rank 1 (step, step 5): killed by SIGKILL", "from step 4")
    assert [fault.met for fault in faults] == [fault.times for fault in faults]
    assert "it is sent again" in ended.logs() and "bytes that were sent; retry 1 of 5" in ended.logs()
    assert final(uri) == final(str(tmp_path / "undisturbed" / "checkpoints"))
    kept = checkpoint_folder(uri)
    assert kept.present() == kept.committed() == [8, 6]
    assert not problems_of(kept.of_step(8)) and not list((tmp_path / "killed" / "checkpoints").glob("step-*"))

    verified = run("checkpoint", "verify", str(tmp_path / "killed")).out
    assert verified.count("all checksums match") == 2 and uri in verified, "the job in the folder says where they are"
    shutil.rmtree(tmp_path / "killed")
    again = train(job, tmp_path / "elsewhere")
    again.require(0)
    assert "attempts" not in {path.name for path in (tmp_path / "elsewhere").iterdir()}, "all steps were done"
    one, two = (
        on_ranks(4, trained, job_of(shards, 4, tp=2, dp=2, zero=3), name, server.environment)
        for name in (uri, str(tmp_path / "undisturbed" / "checkpoints"))
    )
    states = [whole(results) for results in (one, two)]
    assert states[0].keys() == states[1].keys()
    assert all(np.array_equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.slow
def test_the_verbs_read_and_write_a_store(server: ObjectServer, shards: str, tmp_path: Path) -> None:
    """inspect, verify and reshard, both ways; each kind of damage is named with its object."""
    on_ranks(2, saved_twice, small_job(shards), str(tmp_path / "checkpoints"))
    (tmp_path / "checkpoints" / ".lock").unlink(missing_ok=True)
    uri = server.uri("verbs")
    upload(tmp_path / "checkpoints", remote(uri))
    here, there = (run_json("checkpoint", "inspect", path) for path in (str(tmp_path / "checkpoints"), uri))
    assert {**there, "path": ""} == {**here, "path": ""} and there["path"] == f"{uri}/step-00000002"
    assert run("checkpoint", "verify", uri).out.count("all checksums match") == 2
    assert run("checkpoint", "reshard", uri, "--shards", "1", "--out", str(tmp_path / "one")).status == 0
    assert run("checkpoint", "reshard", str(tmp_path / "one"), "--shards", "2", "--out", f"{uri}-two").status == 0
    assert "is already there" in error_line(run("checkpoint", "reshard", uri, "--shards", "1", "--out", f"{uri}-two"))
    first, second = (on_ranks(1, trained, job_of(shards), path, server.environment) for path in (uri, f"{uri}-two"))
    assert first[0]["step"] == second[0]["step"] == 2
    assert all(np.array_equal(a[3], b[3]) for a, b in zip(first[0]["boxes"], second[0]["boxes"]))

    shard = remote(f"{uri}/step-00000002/shard-00001.safetensors")
    good = shard.read_bytes()
    for content, words in (
        (good[:-1000], "bytes instead of"),
        (good[:-3] + bytes([good[-3] ^ 1]) + good[-2:], "is damaged: its checksum differs"),
        (None, "is missing"),
    ):
        if content is None:
            shard.store.delete([str(shard)])
        else:
            shard.write_bytes(content)
        found = run("checkpoint", "verify", f"{uri}/step-00000002")
        assert found.status == 1 and f"{shard}: " in found.out.replace("\n", "") and words in found.out
    results = on_ranks(1, trained, job_of(shards), uri, server.environment)
    assert results[0]["step"] == 1, "the one before it is taken"


def saved_twice(job: Any, folder: str) -> None:
    from shardwise.engine.engine import Engine
    from shardwise.training.checkpoint.save import Saver

    saver = Saver(Engine(job, seed=3), checkpoint_folder(folder))
    for step in (1, 2):
        saver.save(step, {"data": {"batch": step, "left_out": [], "sequences": 8}, "losses": []}, wait=True)
        saver.finish()


# -- data --------------------------------------------------------------------------------------------


def test_tokens_of_a_store_are_those_of_a_disk_and_damage_is_named(
    server: ObjectServer, shards: str, tmp_path: Path
) -> None:
    prefix = remote(server.uri("tokens/words"))
    for suffix in SUFFIXES:
        prefix.with_name(f"words{suffix}").write_bytes(Path(shards + suffix).read_bytes())
    here, there = open_pair(shards), open_pair(str(prefix), cache_bytes=2**20)
    assert isinstance(there.tokens, RemoteArray) and len(there.tokens) == len(here.tokens)
    streams = [Stream(pair, 32, VOCAB, seed=1) for pair in (here, there)]
    for start in streams[0].places(np.arange(20)):
        one, other = (stream.sample(int(start)) for stream in streams)
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.labels, other.labels)
    assert "all checksums match" in run("data", "check", str(prefix)).out
    raw = bytearray(Path(f"{shards}.bin").read_bytes())
    raw[100] ^= 1
    prefix.with_name("words.bin").write_bytes(bytes(raw))
    assert f"{prefix}.bin: is damaged near byte 0" in error_line(run("data", "check", str(prefix)))
    with pytest.raises(SpecError, match=r"words\.bin: is damaged near byte 0"):
        open_pair(str(prefix), cache_bytes=2**22).tokens[0:10]
    prefix.with_name("words.bin").write_bytes(bytes(raw[:-2]))
    with pytest.raises(SpecError, match="bytes, its index says"):
        open_pair(str(prefix))


# -- what is refused, and what is tried again ----------------------------------------------------------


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("uri", "fault", "words"),
    [
        (f"s3://{BUCKET}-none/run", None, "cannot be written to (The specified bucket does not exist); create the"),
        (f"s3://{BUCKET}/run", StoreFault("PUT", "probe", "403", 9), "check the credentials"),
        (f"s3://{BUCKET}/run", StoreFault("GET", "probe", "403", 9), "cannot be read (as the test told it)"),
        (f"s3://{BUCKET}/run", StoreFault("PUT", "probe", "500", 99), "cannot be written to (as the test told it"),
        ("s4://bucket/run", None, "unknown scheme s4"),
        ("gs://bucket/run", None, "needs the package gcsfs, which is not installed; pip install gcsfs"),
        ("memory://run", None, "is in the memory of one process"),
    ],
)
def test_a_store_that_cannot_keep_checkpoints_is_refused_before_anything_starts(
    server: ObjectServer, shards: str, tmp_path: Path, uri: str, fault: StoreFault | None, words: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(shards, run={"checkpoints": {"folder": uri}}).to_yaml(), encoding="utf-8")
    with server.failing(*([fault] if fault else [])):
        line = error_line(run("train", str(file), "--run-folder", str(tmp_path / "run")))
    assert words in line and uri.rstrip("/")[:8] in line, line
    assert not (tmp_path / "run").exists()


def test_a_missing_extra_and_missing_data_are_named(server: ObjectServer, shards: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(small_job(server.uri("nothing")).to_yaml(), encoding="utf-8")
    assert "nothing.idx: is not there" in error_line(run("train", str(file), "--run-folder", str(tmp_path / "run")))
    stub = mock.patch.object(fsspec_store, "is_installed", lambda name: name != "s3fs")
    with stub, mock.patch("shardwise.spec.installation.is_installed", lambda name: name != "s3fs"):
        line = error_line(run("train", str(file), "--run-folder", str(tmp_path / "run")))
    assert "needs the package s3fs, which is not installed; pip install 'shardwise[remote]'" in line
    assert "is not a path of this machine" in error_line(
        run("convert", server.uri("x"), "--to", "full", "--out", str(tmp_path / "x"))
    )


def test_retries_are_bounded_and_said(server: ObjectServer, caplog: pytest.LogCaptureFixture) -> None:
    place = remote(server.uri("object"))
    place.write_bytes(b"content")
    lost = StoreFault("GET", "object", "404", times=99)
    with server.failing(lost), caplog.at_level(logging.WARNING), pytest.raises(OSError, match=r"\(6 times\)"):
        place.read_range(0, 7)
    assert [f"retry {number} of 5" in record.message for number, record in enumerate(caplog.records, 1)] == [True] * 5
    assert place.read_range(0, 7) == b"content"


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["silent", "trickle"])
def test_no_call_to_a_store_waits_longer_than_its_limit(
    server: ObjectServer, how: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what is sent and never answers, or answers a byte a second: every call says so and ends; what a store
    does not give is not called damaged.
    """
    monkeypatch.setattr(stores, "SILENT_SECONDS", 0.2)
    place = remote(server.uri(f"{how}/step-00000001")).within(stores.Limit(0.5))
    store, shard = place.store, str(place / "shard")
    part = memoryview(bytes(fsspec_store.PART_BYTES + 1))  # so that it is sent in parts
    calls: dict[str, Callable[[], Any]] = {
        "put": lambda: store.put(shard, b"content"),
        "upload": lambda: store.upload(shard, lambda: iter([memoryview(b"content")])),
        "parts": lambda: store.upload(shard, lambda: iter([part, part])),
        "read": lambda: store.read(shard, 0, 7),
        "facts": lambda: store.facts(shard),
        "listed": lambda: store.listed(str(place)),
        "delete": lambda: store.delete([shard]),
        "problems": lambda: problems_of(place),
    }
    with server.failing(StoreFault("GET|PUT|POST|HEAD|DELETE", how, how, times=999)):
        for name, call in calls.items():
            caplog.clear()
            with pytest.raises(StoreError, match="no answer within"):
                call()
            assert any("no answer for" in record.message for record in caplog.records), name
    again = place.with_name("again").within(stores.USUAL)
    again.write_bytes(b"content")
    assert again.read_range(0, 7) == b"content", "it is well again"


@pytest.mark.slow
def test_training_goes_on_while_a_store_does_not_answer(server: ObjectServer, shards: str, tmp_path: Path) -> None:
    """The checkpoint of step 2 is never answered, nor the notice that it failed; the later ones are there."""
    uri = server.uri("unanswered")
    checkpoints = {**SETTINGS["checkpoints"], "folder": uri}
    timeouts = {**SETTINGS["timeouts"], "checkpoint": 3}
    silent = StoreFault("PUT|POST", "unanswered/step-00000002", "silent", times=999)
    with server.failing(silent):
        ended = train(small_job(shards, run={"checkpoints": checkpoints, "timeouts": timeouts}), tmp_path / "run")
    ended.require(0)
    assert len(list((tmp_path / "run" / "attempts").iterdir())) == 1, "no restart"
    (failed,) = (one["checkpoint_failed"] for one in ended.lines() if "checkpoint_failed" in one)
    assert "no answer within" in failed and "no answer within" in ended.logs()
    kept = checkpoint_folder(uri)
    assert kept.present() == kept.committed() == [8, 6] and not problems_of(kept.of_step(8))


@pytest.mark.slow
def test_a_moved_run_is_not_begun_again(server: ObjectServer, shards: str, tmp_path: Path) -> None:
    """A run with checkpoints on the disk, and a job that looks for them in the store."""
    (tmp_path / "run").mkdir()
    on_ranks(2, saved_twice, small_job(shards), str(tmp_path / "run" / "checkpoints"))
    (tmp_path / "run" / "job.yaml").write_text(small_job(shards).to_yaml(), encoding="utf-8")
    file = tmp_path / "job.yaml"
    job = small_job(shards, run={"checkpoints": {"folder": server.uri("moved")}})
    file.write_text(job.to_yaml(), encoding="utf-8")
    line = error_line(run("train", str(file), "--run-folder", str(tmp_path / "run")))
    assert "run.checkpoints.folder: is s3://" in line and "has its checkpoints in" in line
    assert json.loads((remote(server.uri("moved")) / ".owner").read_bytes())["folder"] == str(tmp_path / "run")
