"""What an error calls a setting: its keyword in the call of the Python API that raised it.

Errors name settings by the path of their field (``strategy.zero``) or by their flag (``--zero``). A verb's signature
says which keywords it has; a flag of no keyword, such as another program's option, is left as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shardwise.api.given import JobKeywords, keyword_path
from shardwise.spec.errors import SpecError

# Flags of another name than their keyword; `--set` is followed by the path of a field, which stands for itself.
_OTHER_FLAGS = {"framework": "--for", "any_priced": "--any", "unfolded": "--all"}
_NEGATED = {"search": "--no-search", "offload": "--no-offload", "cache": "--no-cache"}
_SET = "--set "
# Commands and a user's own words are quoted: flags in them are no references.
_QUOTED_OR_FLAG = re.compile(r"""`[^`]*`|(?<!\w)(['"]).*?\1(?!\w)|(?P<flag>--[a-z][a-z-]*)""")


def keywords_of(verb: Callable[..., Any]) -> tuple[str, ...]:
    """The keywords that a verb takes, with those of a job if it takes one."""
    parameters = inspect.signature(verb).parameters.values()
    own = tuple(parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD)
    return own if len(own) == len(parameters) else (*own, *JobKeywords.__annotations__)


def in_keywords(error: SpecError, keywords: Collection[str], given: Collection[str] = ()) -> SpecError:
    """The error in keywords of a call that was ``given`` some of them."""
    flags = _keyword_by_flag(keywords)
    field = _keyword_of(error.field, {keyword_path(name): name for name in given if name in keywords})
    return type(error)(*(_named(text, flags) for text in (field, error.problem, error.remedy)))


def _keyword_by_flag(keywords: Collection[str]) -> dict[str, str]:
    flags = {_OTHER_FLAGS.get(name, "--" + name.replace("_", "-")): name for name in keywords}
    return flags | {flag: f"{name}=False" for name, flag in _NEGATED.items() if name in keywords}


def _keyword_of(field: str, names: Mapping[str, str]) -> str:
    """The field as its keyword, if it or what it is part of was given by one."""
    for path, name in names.items():
        if field == path or field.startswith((f"{path}.", f"{path}[")):
            return name + field.removeprefix(path)
    return field


def _named(text: str, flags: Mapping[str, str]) -> str:
    def word(match: re.Match[str]) -> str:
        return flags.get(match["flag"] or "", match[0])

    return _QUOTED_OR_FLAG.sub(word, text.replace(_SET, ""))
