"""Errors of the Python API name keywords (``zero``).

They are raised with the path of a field (``strategy.zero``) or with a flag (``--zero``), which are replaced by the
keywords of the verb's signature. Flags that are no keyword, such as another program's options, stay.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardwise.api.given import JobKeywords, keyword_path
from shardwise.spec.errors import SpecError

# Flags with another name than their keyword; `--set` is dropped, and the path of a field after it stays.
_OTHER_FLAGS = {"framework": "--for", "any_priced": "--any", "unfolded": "--all"}
_NEGATED = {"search": "--no-search", "offload": "--no-offload", "cache": "--no-cache"}
_SET = "--set "
# Flags inside quotes belong to commands or to a user's own text, and stay.
_QUOTED_OR_FLAG = re.compile(r"""`[^`]*`|(?<!\w)(['"]).*?\1(?!\w)|(?P<flag>--[a-z][a-z-]*)""")


def keywords_of(verb: Callable[..., Any]) -> tuple[str, ...]:
    """The keywords that a verb takes, including those of a job if it takes one."""
    parameters = inspect.signature(verb).parameters.values()
    own = tuple(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD)
    return own if len(own) == len(parameters) else (*own, *JobKeywords.__annotations__)


def in_keywords(error: SpecError, keywords: Collection[str], given: Collection[str] = ()) -> SpecError:
    """The error with keywords in place of flags; its field becomes a keyword if the call was ``given`` that."""
    flags = _keyword_by_flag(keywords)
    field = _keyword_of(error.field, {keyword_path(name): name for name in given if name in keywords})
    return type(error)(*(_named(text, flags) for text in (field, error.problem, error.remedy)))


def _keyword_by_flag(keywords: Collection[str]) -> dict[str, str]:
    flags = {_OTHER_FLAGS.get(name, "--" + name.replace("_", "-")): name for name in keywords}
    return flags | {flag: f"{name}=False" for name, flag in _NEGATED.items() if name in keywords}


def _keyword_of(field: str, names: Mapping[str, str]) -> str:
    """The field as a keyword, if it or the part of the job around it was given by one."""
    for path, name in names.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field.removeprefix(path)
    return field


def _named(text: str, flags: Mapping[str, str]) -> str:
    def word(match: re.Match[str]) -> str:
        return flags.get(match["flag"] or "", match[0])

    return _QUOTED_OR_FLAG.sub(word, text.replace(_SET, ""))
