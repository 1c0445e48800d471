"""Files of torch.save from strangers: what they would call is never called, wherever they lie."""

from __future__ import annotations

import argparse
import builtins
import os
import pickle
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cli.running import error_line, run
from shardwise.spec.errors import SpecError
from shardwise.training.convert.torch_file import Inert, fields_of, read_torch_file
from training.convert.foreign_folders import foreign_object, write_deepspeed, write_megatron
from training.convert.test_convert import EVEN, model_file, tensors_of


class Calls:
    """Pickled, it is a call of ``function`` by whoever unpickles it."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def chain(marker: Path) -> Calls:
    """`builtins.getattr(os, "system")` and a call of what comes out."""

    class Found(Calls):
        pass

    module = Found(builtins.__import__, "os")
    return Calls(builtins.map, Found(builtins.getattr, module, "system"), [f"touch {marker}"])


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "os.system": lambda marker: Calls(os.system, f"touch {marker}"),
    "eval": lambda marker: Calls(eval, f"open({str(marker)!r}, 'w')"),
    "exec": lambda marker: Calls(exec, f"open({str(marker)!r}, 'w')"),
    "subprocess": lambda marker: Calls(subprocess.check_call, ["touch", str(marker)]),
    "getattr": chain,
    "torch.save": lambda marker: Calls(torch.save, {}, str(marker)),
    "torch.load": lambda marker: Calls(torch.load, str(marker)),
    "open": lambda marker: Calls(open, str(marker), "w"),
    "a method": lambda marker: Calls(getattr(marker, "touch")),  # noqa: B009
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    tensors = tensors_of(EVEN)
    write_deepspeed(folder / "ds", tensors, 2, 2)
    write_megatron(folder / "meg", EVEN, tensors, tp=2, pp=1)
    torch.save(tensors, folder / "one.pt")
    model_file(EVEN, folder)
    return folder


PLACES = {
    "one.pt": "one.pt",
    "ds": "ds/global_step7/mp_rank_00_model_states.pt",
    "ds ": "ds/global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    "meg": "meg/iter_0000012/mp_rank_01/model_optim_rng.pt",
}


def everywhere() -> list[Any]:
    among = [(place, kind, False) for place in PLACES for kind in HOSTILE]
    return [*among, *((place, "os.system", True) for place in PLACES)]


@pytest.mark.parametrize(("source", "kind", "alone"), everywhere())
def test_a_hostile_file_runs_nothing(folders: Path, tmp_path: Path, source: str, kind: str, alone: bool) -> None:
    """Among weights, or as all that is in a file."""
    shutil.copytree(folders, tmp_path / "copy")
    file, marker = tmp_path / "copy" / PLACES[source], tmp_path / "marker"
    bomb = HOSTILE[kind](marker)
    torch.save(bomb if alone else {"model": {"a": torch.zeros(2)}, "extra": [bomb]}, file)
    arguments = ("--to", "full", "--out", str(tmp_path / "out"), "--model", str(tmp_path / "copy" / "even.yaml"))
    line = error_line(run("convert", str(tmp_path / "copy" / source.strip()), *arguments))
    assert file.name in line
    assert "none of it was executed" in line
    assert not marker.exists()
    assert not (tmp_path / "out").exists()


def written(path: Path, program: bytes, **records: bytes) -> Path:
    """An archive as torch.save makes it, with a pickle of one's own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for name, content in records.items():
            archive.writestr(f"archive/data/{name.removeprefix('_')}", content)
    return path


def storage(key: bytes, numel: int) -> bytes:
    """The instructions that leave a storage of floats on the stack."""
    number = b"K" + bytes([numel])
    return (
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x00"
        + key
        + b"X\x03\x00\x00\x00cpu"
        + number
        + b"tQ"
    )


REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
PROGRAMS = {
    # A tensor of 100 numbers over a storage of four.
    "beyond": b"\x80\x02" + REBUILD + b"(" + storage(b"0", 4) + b"K\x00(Kdt(K\x01t\x89NtR.",
    "negative": b"\x80\x02" + REBUILD + b"(" + storage(b"0", 4) + b"J\xff\xff\xff\xff(K\x01t(K\x01t\x89NtR.",
    "no-storage": b"\x80\x02" + REBUILD + b"(K\x01K\x00(K\x01t(K\x01t\x89NtR.",
    # BUILD: attributes of the function that rebuilds, of a class, of a type of numbers.
    "change-function": b"\x80\x02" + REBUILD + b"}X\x01\x00\x00\x00aK\x01sb.",
    "change-class": b"\x80\x02ccollections\nOrderedDict\n}X\x05\x00\x00\x00itemsK\x01sb.",
    "change-inert": b"\x80\x02cforeign\nThing\n}X\x05\x00\x00\x00itemsK\x01sb.",
    "change-dtype": b"\x80\x02ctorch\nfloat32\n}X\x05\x00\x00\x00itemsK\x01sb.",
    "extension": b"\x80\x02\x82\x01.",
    "endless": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "no-pickle": b"hello",
    "empty": b"",
}


SAYS = {"beyond": "beyond the numbers", "negative": "impossible shape", "no-storage": "not a storage",
        "change-function": "changes a function"}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_strange_program_is_one_line(name: str, tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", PROGRAMS[name], _0=bytes(16))
    line = error_line(run("convert", str(path), "--to", "full", "--out", str(tmp_path / "o"), "--model", "tiny"))
    assert SAYS.get(name, "x.pt") in line


def test_plain_programs_by_hand(tmp_path: Path) -> None:
    """So that the strange ones above fail for what is strange in them."""
    numbers = torch.arange(4.0)
    raw = numbers.numpy().tobytes()
    program = b"\x80\x02" + REBUILD + b"(" + storage(b"0", 4) + b"K\x00(K\x04t(K\x01t\x89NtR."
    assert torch.equal(read_torch_file(written(tmp_path / "x.pt", program, _0=raw)), numbers)


def test_torchscript_and_compressed_files_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x.pt", pickle.dumps({}, 2))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/constants.pkl", b"")
    with pytest.raises(SpecError, match="TorchScript"):
        read_torch_file(path)
    with zipfile.ZipFile(tmp_path / "y.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({}, 2))
        archive.writestr("archive/version", b"3\n")
    with pytest.raises(SpecError, match="compressed"):
        read_torch_file(tmp_path / "y.pt")


def test_what_is_read(tmp_path: Path) -> None:
    """Tensors as they are, and of objects of other classes what they were given."""
    matrix = torch.arange(12.0).view(3, 4)
    with foreign_object("somewhere.else_", "Settings") as settings:
        content = {
            "views": [matrix[:, 1:3], matrix.T, matrix.bfloat16(), matrix.to(torch.float8_e4m3fn), torch.empty(0)],
            "parameter": torch.nn.Parameter(matrix),
            "shape": matrix.shape,
            "type": torch.float16,
            "arguments": argparse.Namespace(layers=3, name="x", path=Path("x")),
            "settings": settings,
            "module": torch.nn.Linear(2, 2).state_dict(),
            "device": torch.device("cpu"),
        }
        torch.save(content, tmp_path / "x.pt")
    found = read_torch_file(tmp_path / "x.pt")
    for one, expected in zip([*found["views"], found["parameter"]], [*content["views"], matrix], strict=True):
        assert one.dtype == expected.dtype and torch.equal(one.float(), expected.float())
    assert found["shape"] == (3, 4) and found["type"] == torch.float16
    assert fields_of(found["arguments"])["layers"] == 3
    assert isinstance(found["settings"], Inert) and fields_of(found["settings"]) == {"loss_scale": 65536.0}
    assert all(isinstance(one, Tensor) for one in found["module"].values())


@pytest.mark.parametrize("how", ["flipped", "short", "folder"])
def test_damage_is_found(how: str, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(10_000)}, path)
    raw = bytearray(path.read_bytes())
    if how == "flipped":
        raw[20_000] ^= 1
        path.write_bytes(raw)
    elif how == "short":
        path.write_bytes(raw[:-100])
    else:
        path.unlink()
        path.mkdir()
    with pytest.raises(
        SpecError, match={"flipped": "damaged", "short": "cut off", "folder": "is not a file|cannot"}[how]
    ):
        read_torch_file(path)
