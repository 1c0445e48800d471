"""Text that grows by a token at a time."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.generation.request import Generated
from shardwise.run.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"  # what a tokenizer shows for the first bytes of a character


class GrowingText:
    """``add`` returns what a token adds to the text after ``prompt``: nothing while a character is incomplete.

    A token may be decoded differently after others, such as with a space, so the tokens before it are decoded with it.
    Without a tokenizer the text is the tokens' numbers.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        self._from = 0  # the first token that is decoded again
        self._shown = self._prompt = len(prompt)  # the first that is not shown yet

    def add(self, token: int) -> str:
        self._tokens.append(token)
        if self._tokenizer is None:
            return str(token) if len(self._tokens) == self._prompt + 1 else f" {token}"
        before, now = self._decoded(self._shown), self._decoded(len(self._tokens))
        if len(now) <= len(before) or now.endswith(_UNFINISHED):
            return ""
        self._from, self._shown = self._shown, len(self._tokens)
        return now[len(before) :]

    def rest(self) -> str:
        """What was held back until the end."""
        if self._tokenizer is None:
            return ""
        return self._decoded(len(self._tokens))[len(self._decoded(self._shown)) :]

    def _decoded(self, stop: int) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(self._tokens[self._from : stop])


def text_of(generated: Generated, tokenizer: Tokenizer | None) -> str | None:
    """The text generated after a prompt; None without a tokenizer."""
    if tokenizer is None:
        return None
    growing = GrowingText(tokenizer, generated.prompt)
    return "".join((*(growing.add(token) for token in generated.tokens), growing.rest()))
