"""Documents as tokens, with a mask where the loss does not count all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwise.run.data.chat_template import ChatTemplate, Renderer, template_beside
from shardwise.run.data.conversations import Content, Conversation, Document, PreferencePair, Span, is_templated
from shardwise.run.data.token_files import BYTES, Tokens, tokenizer_from
from shardwise.spec.errors import SpecError

Encoded = tuple[Tokens, Tokens | None]


@dataclass(frozen=True)
class Encoding:
    """How text becomes tokens: what a process needs to make an `Encoder`."""

    tokenizer: str
    template: ChatTemplate | None = None  # of conversations; without it they are lines of `role: text`

    @classmethod
    def of(cls, tokenizer: str, template: str | None = None) -> Encoding:
        """With the template in the file ``template``, or beside the tokenizer."""
        if tokenizer == BYTES and template is None:
            return cls(tokenizer)
        # No file lies beside the byte tokenizer: the name of none stands for its folder.
        beside = Path(template).parent / BYTES if tokenizer == BYTES and template else Path(tokenizer)
        return cls(tokenizer, template_beside(beside, template))


class Encoder:
    """Makes tokens of documents, one or, of a preference, two."""

    def __init__(self, encoding: Encoding) -> None:
        self.encoding = encoding
        self._tokenizer = tokenizer_from(encoding.tokenizer)
        self._renderer = None if encoding.template is None else Renderer(encoding.template)
        if encoding.template is None:
            self._tokenizer.required_end()

    @property
    def vocab(self) -> int:
        return self._tokenizer.vocab

    def check(self, contents: Sequence[Content]) -> None:
        """Raises SpecError if some of these need a template that is none."""
        if self._renderer is not None and any(map(is_templated, contents)):
            self._renderer.check()

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    def __call__(self, content: Content) -> list[Encoded]:
        """Raises SpecError for a conversation that the template refuses."""
        if isinstance(content, PreferencePair):
            return [self._document(content.chosen), self._document(content.rejected)]
        return [self._document(content)]

    def _document(self, document: Document) -> Encoded:
        if isinstance(document, Conversation):
            if self._renderer is not None:
                rendered = self._renderer(document)
                return self._with_labels(document, *self._tokenizer.encode_counted(rendered.text, rendered.counted))
            document = in_lines(document)
        pieces = [self._tokenizer.encode(span.text) for span in document]
        tokens = np.concatenate([*pieces, np.array([self._tokenizer.required_end()], np.int32)])
        if all(span.counted for span in document):
            return tokens, None
        flags = [np.full(len(piece), span.counted, np.uint8) for piece, span in zip(pieces, document)]
        return tokens, np.concatenate([*flags, np.array([document[-1].counted], np.uint8)])

    def _with_labels(self, conversation: Conversation, tokens: Tokens, mask: Tokens) -> Encoded:
        if not mask.any():
            raise SpecError(conversation.where, "has an answer without tokens", "leave it out")
        return tokens, mask


def in_lines(conversation: Conversation) -> tuple[Span, ...]:
    """A conversation without a template: a line for each message, of which the loss counts the answers."""
    if conversation.tools or any("tool_calls" in message for message in conversation.messages):
        problem = "calls tools, which only a chat template can write"
        raise SpecError(conversation.where, problem, "use a tokenizer that has one, or ⟨chat_template=FILE⟩")
    return tuple(
        Span(f"{message['role']}: {message['content']}\n", counted=place in conversation.answers)
        for place, message in enumerate(conversation.messages)
    )
