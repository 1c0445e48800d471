"""The verbs as functions: `plan`, `analyze`, `predict`, `verify`, `train`, `status`, `compare`, `write_report`,
`calibrate`, `validate`, `generate`.

Each takes a job (a Job, a file, keywords) or what the command of that name takes, and returns a `Result`. They are
imported when first used. The command line calls the same functions; here errors name keywords instead of flags.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

from shardwise.spec.errors import SpecError

VERBS = {
    "analyze": "analysis",
    "predict": "analysis",
    "plan": "planning",
    "plan_mixed": "planning",
    "verify": "verification",
    "train": "execution",
    "status": "observation",
    "compare": "comparison",
    "write_report": "reporting",
    "calibrate": "calibration",
    "validate": "validation",
    "generate": "generation",
}
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_OTHER_NAMES = {"for": "framework", "from": "run", "set": "strategy", "grace": "grace_seconds"}


def __getattr__(name: str) -> Any:
    if name not in VERBS:
        raise AttributeError(f"module 'shardwise.api' has no attribute {name!r}")
    module = importlib.import_module(f"shardwise.api.{VERBS[name]}")
    verb = globals()[name] = with_keyword_errors(getattr(module, name))
    return verb


def with_keyword_errors(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose errors name keywords where the command line has flags."""

    @functools.wraps(verb)
    def called(*arguments: Any, **keywords: Any) -> Any:
        try:
            return verb(*arguments, **keywords)
        except SpecError as error:
            raise type(error)(*map(in_keywords, (error.field, error.problem, error.remedy))) from None

    return called


def in_keywords(text: str) -> str:
    """A message that names keywords where the command line has flags."""
    return _FLAG.sub(lambda flag: _OTHER_NAMES.get(flag[1], flag[1].replace("-", "_")), text)
