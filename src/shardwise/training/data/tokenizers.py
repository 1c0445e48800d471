"""From text to tokens: bytes by default, or a Hugging Face tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from shardwise.spec.errors import SpecError
from shardwise.spec.packages import require_packages
from shardwise.training.data.pair import Tokens


class Tokenizer(Protocol):
    """``end`` is the token after every document; ``vocab`` counts all, ``end`` included."""

    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int: ...
    def encode(self, text: str) -> Tokens: ...


class Bytes:
    """Every byte of UTF-8 is a token; 256 ends a document."""

    vocab = 257
    end = 256

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)


class HuggingFace:
    """A ``tokenizer.json``, or the folder that holds one."""

    def __init__(self, path: Path) -> None:
        require_packages("tokenizer", "tokenizers")
        from tokenizers import Tokenizer as Model

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise SpecError(str(file), "is not there", "name a tokenizer.json or a folder that holds one, or: bytes")
        try:
            self._model: Any = Model.from_file(str(file))
        except Exception as error:  # its parser raises plain Exception
            raise SpecError(str(file), f"is not a tokenizer ({error})", "download it again") from None
        self.vocab = int(self._model.get_vocab_size(with_added_tokens=True))
        self.end = self._end(file)

    def _end(self, file: Path) -> int:
        known = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")
        for text in known:
            number = self._model.token_to_id(text)
            if number is not None:
                return int(number)
        raise SpecError(str(file), "has no token that ends a text", "one of " + ", ".join(known))

    def encode(self, text: str) -> Tokens:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)


def tokenizer_from(name: str) -> Tokenizer:
    """``bytes``, or the path of a Hugging Face tokenizer."""
    return Bytes() if name == "bytes" else HuggingFace(Path(name))
