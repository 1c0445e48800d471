"""The verbs as functions: `plan`, `analyze`, `predict`, `verify`, `train`, `status`, `compare`, `write_report`,
`calibrate`, `validate`, `generate`, `finetune`.

Each takes a job (a Job, a file, keywords) or what the command of that name takes, and returns a `Result`. They are
imported when first used. The command line calls the same functions; here errors name keywords, there flags.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from shardwise.api.quantities import keywords_now
from shardwise.spec.errors import SpecError

VERBS = {
    "analyze": "analysis",
    "predict": "analysis",
    "plan": "planning",
    "plan_mixed": "planning",
    "verify": "verification",
    "train": "execution",
    "status": "observation",
    "compare": "observation",
    "write_report": "reporting",
    "calibrate": "calibration",
    "validate": "validation",
    "generate": "generation",
    "finetune": "fine_tuning",
}


def __getattr__(name: str) -> Any:
    if name not in VERBS:
        raise AttributeError(f"module 'shardwise.api' has no attribute {name!r}")
    module = importlib.import_module(f"shardwise.api.{VERBS[name]}")
    verb = globals()[name] = with_keyword_errors(getattr(module, name))
    return verb


def with_keyword_errors(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same function; its errors name a field of the job by the keyword that it was given by."""

    @functools.wraps(verb)
    def called(*arguments: Any, **keywords: Any) -> Any:
        try:
            return verb(*arguments, **keywords_now(verb.__name__.removeprefix("write_"), keywords))
        except SpecError as error:
            raise _by_keyword(error.worded(), keywords) from None

    return called


def _by_keyword(error: SpecError, keywords: Iterable[str]) -> SpecError:
    from shardwise.api.run_options import option_paths
    from shardwise.spec.fields import keyword_paths

    paths = option_paths() | keyword_paths()
    names = {paths.get(name, name): name for name in keywords}
    for path, name in names.items():
        if error.field == path or error.field.startswith((f"{path}.", f"{path}[")):
            return type(error)(name + error.field.removeprefix(path), error.problem, error.remedy)
    return error
