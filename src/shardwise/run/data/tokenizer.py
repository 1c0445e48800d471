"""Tokenizers: bytes, and the ``tokenizer.json`` of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.run.data.token_files import Tokens
from shardwise.spec.errors import SpecError
from shardwise.spec.installation import require_packages

FILE = "tokenizer.json"
BYTES = "bytes"
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<｜end▁of▁sentence｜>")


class ByteTokenizer:
    """Every byte of UTF-8 is a token."""

    vocab = 257
    end = 256
    """The token that ends a document."""

    def encode(self, text: str) -> Tokens:
        return np.frombuffer(text.encode("utf-8", "surrogateescape"), np.uint8).astype(np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        return [int(token) for token in self.encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", "replace")

    def required_end(self) -> int:
        return self.end


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, or the folder that holds one; ``end``, the token that ends a text, is None if unknown."""

    def __init__(self, path: Path) -> None:
        require_packages("tokenizer", "tokenizers")
        from tokenizers import Tokenizer as Model

        self.file = path / FILE if path.is_dir() else path
        if not self.file.is_file():
            remedy = "name a tokenizer.json or a folder that holds one, or: bytes"
            raise SpecError(str(self.file), "is not there", remedy)
        try:
            self._model: Any = Model.from_file(str(self.file))
        except Exception as error:  # its parser raises plain Exception
            raise SpecError(str(self.file), f"is not a tokenizer ({error})", "download it again") from None
        self._model.no_truncation()
        self._model.no_padding()
        self.vocab = int(self._model.get_vocab_size(with_added_tokens=True))
        known = (self._model.token_to_id(text) for text in _ENDS)
        self.end: int | None = next((int(number) for number in known if number is not None), None)

    def required_end(self) -> int:
        """Raises SpecError if no token is known to end a text."""
        if self.end is None:
            raise SpecError(str(self.file), "has no token that ends a text", "one of " + ", ".join(_ENDS))
        return self.end

    def encode(self, text: str) -> Tokens:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_prompt(self, text: str) -> list[int]:
        """With the tokens that begin a text, if the model was trained with any."""
        return [int(token) for token in self._model.encode(text, add_special_tokens=True).ids]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._model.decode(list(tokens), skip_special_tokens=True)
        return text


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def tokenizer_from(name: str) -> Tokenizer:
    """``bytes``, or the path of a Hugging Face tokenizer."""
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name))
