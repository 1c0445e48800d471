"""Files of ``torch.save``, read without executing anything in them.

Such a file is a pickle: a program that may import and call any function. Here nothing is imported. Tensors are rebuilt
by our own functions, which check every argument; torch's types are known; every other class becomes an `Inert` that
keeps what it was given. The numbers stay in the mapped file until they are used.
"""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.engine.torch_private import PyTorchFileReader
from shardwise.spec.errors import SpecError, shown

MOST_PICKLE_BYTES = 2**30
_CHUNK_BYTES = 8 * 2**20
_TRUST = "take the file from someone you trust"
# Modules that no weights need: a file that names one is rejected. (commands: subprocess in old protocols.)
_HARMFUL = frozenset(
    {
        "_posixsubprocess", "asyncio", "bdb", "cProfile", "code", "codeop", "commands", "ctypes", "doctest", "ftplib",
        "http", "importlib", "marshal", "multiprocessing", "nt", "operator", "os", "pdb", "pickle", "pip",
        "pkgutil", "posix", "profile", "pty", "pydoc", "requests", "runpy", "shutil", "site", "smtplib",
        "socket", "ssl", "subprocess", "sys", "tempfile", "threading", "timeit", "trace", "urllib",
        "webbrowser",
    }
)  # fmt: skip
_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN = frozenset(
    {
        "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object", "range",
        "set", "slice", "str", "tuple",
    }
)  # fmt: skip


class Inert:
    """Stands for an object of a class that is not loaded: keeps its arguments and state, and has no behaviour."""

    __slots__ = ("arguments", "items", "state")
    qualified = ""
    arguments: tuple[Any, ...]
    items: list[Any]
    state: Any

    def __new__(cls, *arguments: Any, **named: Any) -> Inert:
        made = super().__new__(cls)
        made.arguments, made.items, made.state = arguments, [], None
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        self.items.append(value)

    extend = add = append


def fields_of(content: Any) -> dict[str, Any]:
    """The attributes of an object such as an ``argparse.Namespace``; empty if it has none."""
    state = content.state if isinstance(content, Inert) else content
    return {key: value for key, value in state.items() if isinstance(key, str)} if isinstance(state, dict) else {}


def read_torch_file(path: Path) -> Any:
    """The content of a file of ``torch.save`` (zip format); raises SpecError for everything else."""
    if not path.is_file():
        raise SpecError(str(path), "is not a file", "check the path")
    return _read(str(path), path, mmap=True)


def read_torch_bytes(content: bytes, where: Path) -> Any:
    """The same for bytes that ``torch.save`` wrote into the middle of the file ``where``."""
    return _read(io.BytesIO(content), where, mmap=False)


def read_pickle(path: Path) -> Any:
    """The content of a small plain pickle without tensors."""
    with _as_spec_error(path, "a pickle"):
        if path.stat().st_size > MOST_PICKLE_BYTES:
            raise _RefusedError("is larger than 1 GiB")
        with path.open("rb") as file:
            return _Unpickler(file).load()


def _read(file: str | io.BytesIO, path: Path, *, mmap: bool) -> Any:
    _require_sound_archive(file, path)
    with _as_spec_error(path, "a file of torch.save"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = SimpleNamespace(__name__=__name__, Unpickler=_Unpickler)
        return torch.load(
            _from_its_start(file), map_location="cpu", pickle_module=module, mmap=mmap, weights_only=False
        )


@contextmanager
def _as_spec_error(path: Path, kind: str) -> Iterator[None]:
    """Turns any error in an untrusted file into a one-line SpecError."""
    try:
        yield
    except _RefusedError as error:
        raise SpecError(str(path), f"{error}; none of it was executed", _TRUST) from None
    except Exception as error:
        problem = f"cannot be read as {kind} ({shown(str(error))})"
        raise SpecError(str(path), problem, "save it again with a current torch") from None


def _require_sound_archive(file: str | io.BytesIO, path: Path) -> None:
    """Checks the archive itself: no code in it, nothing compressed, every record intact."""
    try:
        if not zipfile.is_zipfile(file):
            problem = "is not a zip archive, or is cut off"
            raise SpecError(str(path), problem, "load and save it once with torch 1.6 or newer")
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
            names = [record.filename.rpartition("/")[2] for record in records]
            # By torch's own reader, which decides whether torch.load runs the file's code.
            reader: Any = PyTorchFileReader
            is_script = "constants.pkl" in reader(_from_its_start(file)).get_all_records()
            if names.count("data.pkl") != 1 or is_script:
                raise SpecError(str(path), "is not a file of torch.save (or TorchScript, which is code)", _TRUST)
            if any(record.compress_type != zipfile.ZIP_STORED for record in records):
                raise SpecError(str(path), "is compressed, as torch.save never does", _TRUST)
            if records[names.index("data.pkl")].file_size > MOST_PICKLE_BYTES:
                raise SpecError(str(path), "describes its tensors in more than 1 GiB", _TRUST)
            for record in records:
                with archive.open(record) as content:
                    while content.read(_CHUNK_BYTES):  # zipfile compares the checksum at the end
                        pass
    except SpecError:
        raise
    except zipfile.BadZipFile as error:
        remedy = "take another copy, or save it with checksums (torch.serialization.set_crc32_options)"
        raise SpecError(str(path), f"is damaged ({shown(str(error))})", remedy) from None
    except OSError as error:
        raise SpecError(str(path), f"cannot be read ({error.strerror})", "check the file") from None
    except (EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise SpecError(str(path), f"is damaged ({shown(str(error))})", "get another copy") from None


def _from_its_start(file: str | io.BytesIO) -> str | io.BytesIO:
    if not isinstance(file, str):
        file.seek(0)
    return file


class _RefusedError(pickle.UnpicklingError):
    pass


class _Unpickler(pickle.Unpickler):
    """Resolves names by our own table: imports no module, and returns nothing that a file could modify."""

    def find_class(self, module: str, name: str) -> Any:
        qualified = f"{module}.{name}"
        if qualified in _KNOWN:
            return _KNOWN[qualified]
        if module == "torch" and isinstance(constant := vars(torch).get(name), _CONSTANTS):
            return constant
        if _is_harmful(module, name):
            raise _RefusedError(f"names {shown(qualified)}, which weights never need")
        return type("Inert", (Inert,), {"__slots__": (), "qualified": qualified})


def _is_harmful(module: str, name: str) -> bool:
    top = module.partition(".")[0]
    if top in ("builtins", "__builtin__"):
        return name not in _PLAIN
    if top in ("torch", "io", "_io"):  # classes may be named; no unknown function is needed to rebuild a tensor
        return name[:1].islower() and name != "device"
    return top in _HARMFUL


class _Mapping(dict[Any, Any]):
    """An OrderedDict, without the attributes that modules attach to theirs."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        return


class _Function:
    """One of our functions under the name that files use, without attributes that a file could modify."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError("changes a function of torch")


class _Bytes:
    """The type of an untyped storage, as torch.load expects it; it cannot be called."""

    __slots__ = ()
    dtype = torch.uint8

    def __setstate__(self, state: Any) -> None:
        raise _RefusedError("changes a type of torch")


def _rebuilt(storage: Any, offset: Any, shape: Any, stride: Any, *further: Any, dtype: Any = None) -> Tensor:
    """A tensor over a stored range of numbers, after a bounds check."""
    if not isinstance(storage, torch.storage.TypedStorage):
        raise _RefusedError("makes a tensor of something that is not a storage")
    numbers = (offset, *shape, *stride)
    if len(shape) != len(stride) or any(type(number) is not int or number < 0 for number in numbers):
        raise _RefusedError("makes a tensor of an impossible shape")
    dtype = dtype or storage.dtype
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride))
    raw: torch.UntypedStorage = storage.untyped()  # type: ignore[no-untyped-call]
    if 0 not in shape and (last + 1) * dtype.itemsize > raw.nbytes():
        raise _RefusedError("makes a tensor beyond the numbers that are stored")
    return torch.empty(0, dtype=dtype).set_(raw, offset, tuple(shape), tuple(stride))


def _rebuilt_with_type(storage: Any, offset: Any, shape: Any, stride: Any, *further: Any) -> Tensor:
    """As `_rebuilt` for an untyped storage: the type is the third argument after the strides."""
    dtype = further[2] if len(further) > 2 and isinstance(further[2], torch.dtype) else None
    return _rebuilt(storage, offset, shape, stride, dtype=dtype)


def _rebuilt_from_type(rebuild: Any, kind: Any, arguments: Any, *state: Any) -> Tensor:
    """The plain tensor inside one of a subclass, or with attributes (ZeRO-3's parameters)."""
    if not isinstance(rebuild, _Function) or not isinstance(arguments, tuple):
        raise _RefusedError("makes a tensor by a function that is not known")
    made = rebuild(*arguments)
    if not isinstance(made, Tensor):
        raise _RefusedError("makes a tensor of something that is not one")
    return made


def _whole_number(value: Any) -> int:
    if type(value) is not int:
        raise _RefusedError("names a member of an enumeration of integers that is not an integer")
    return value


_parameter = _Function(lambda data, *further: data)  # a parameter is its numbers
_KNOWN: dict[str, Any] = {
    "collections.OrderedDict": _Mapping,
    "deepspeed.runtime.zero.config.ZeroStageEnum": _Function(_whole_number),
    "torch.Size": _Function(tuple),
    "torch._tensor._rebuild_from_type_v2": _Function(_rebuilt_from_type),
    "torch._utils._rebuild_tensor": _Function(_rebuilt),
    "torch._utils._rebuild_tensor_v2": _Function(_rebuilt),
    "torch._utils._rebuild_tensor_v3": _Function(_rebuilt_with_type),
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.storage.UntypedStorage": _Bytes(),
}
