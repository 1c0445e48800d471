"""Files as streams whose memory is bounded, whatever their headers claim: gzip, and the members of a tar."""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from shardwise.spec.errors import SpecError
from shardwise.spec.units import readable_bytes

PIECE_BYTES = 2**20  # the most that is asked of a stream at once; no header of a tar has as many
_BLOCK_BYTES = 512  # of a tar
TARS = (".tar", ".tar.gz", ".tgz")
_GZIP = b"\x1f\x8b"  # its first bytes (RFC 1952)
# What the readers raise for a file that is cut or holds something else.
DAMAGED = (OSError, EOFError, zlib.error, tarfile.TarError, ValueError, ArithmeticError, LookupError)
_AGAIN = "copy it again, or --on-bad-record skip leaves out the rest of it"


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if it ends in .gz; of a tar, if it is packed, whatever its name says."""
    name = path.name.lower()
    packed = name.endswith(".gz")
    if name.endswith(TARS):
        with path.open("rb") as file:
            packed = file.read(len(_GZIP)) == _GZIP
    return cast(BinaryIO, gzip.open(path, "rb") if packed else path.open("rb"))


def damaged(path: Path, where: str, error: Exception) -> SpecError:
    """One line for what a reader raised, and how far it came: ``where``, such as "after line 12"."""
    reason = getattr(error, "strerror", None) or str(error)[:120] or type(error).__name__
    return SpecError(str(path), f"is damaged {where} ({reason})", _AGAIN)


def too_large(where: str, most: int) -> SpecError:
    return SpecError(where, f"is larger than {readable_bytes(most)}", "raise --max-record, or split it")


def read_at_most(file: BinaryIO, most: int) -> bytes | None:
    """All of a stream; None if it has more than ``most`` bytes."""
    pieces, held = [], 0
    while piece := file.read(PIECE_BYTES):
        held += len(piece)
        if held > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)


@dataclass(frozen=True)
class Member:
    """A file in a tar: ``content`` is None if it is larger than asked for."""

    name: str
    content: bytes | None


def members_of(file: BinaryIO, suffixes: tuple[str, ...], most: int) -> Iterator[Member]:
    """The members with one of the suffixes, in the order of the archive; raises one of `DAMAGED`."""
    blocks = _Blocks(file)
    before = -1
    with tarfile.open(fileobj=cast(Any, blocks), mode="r:") as archive:
        while (member := archive.next()) is not None:
            if member.size < 0 or member.offset <= before:
                raise tarfile.ReadError("a member of negative size")
            before = member.offset
            cast(Any, archive).members.clear()  # it keeps a description of each
            if not member.isfile() or not member.name.lower().endswith(suffixes):
                continue
            content = None
            if member.size <= most:
                inner = archive.extractfile(member)
                assert inner is not None
                content = read_at_most(cast(BinaryIO, inner), most)
                if content is not None and len(content) != member.size:
                    raise tarfile.ReadError("unexpected end of data")
            yield Member(member.name, content)
        # tarfile takes anything that is no header for the end.
        if blocks.last.strip(b"\0") or len(blocks.last) not in (0, _BLOCK_BYTES):
            raise tarfile.ReadError("a header is damaged or cut")


class _Blocks:
    """What tarfile reads, forwards only and in small pieces: a header may ask for gigabytes, or for more than there is
    without end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._empty = 0
        self.last = b""

    def read(self, size: int) -> bytes:
        if not 0 <= size <= PIECE_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        self.last = self._file.read(size)
        self._empty = 0 if self.last else self._empty + 1
        if self._empty > 4:
            raise tarfile.ReadError("unexpected end of data")
        return self.last

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, place: int) -> int:
        if not 0 <= place < 2**62:
            raise tarfile.ReadError("a member of an impossible size")
        return self._file.seek(place)
