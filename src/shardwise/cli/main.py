"""The command line: parse, call, print. Only the verb that is asked for is imported."""

from __future__ import annotations

import errno
import gc
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress

from shardwise.cli.streams import ReaderGone, piped_streams
from shardwise.spec.errors import SpecError, in_flags, nearest_name, shown

VERBS = {
    "plan": "find the best way to split a training job over a cluster, explain it, and write a job file",
    "analyze": "price one job: communication per dimension, memory, step time, bottleneck",
    "ui": "a page on this machine that prices a job while you change it: memory, timeline, published runs, search",
    "train": "run a job, here or on other hosts: start the processes, train, resume after a failure",
    "finetune": "adapt a model to conversations: choose what fits, plan, train, write an adapter, show a sample",
    "status": "how a run is doing, while it goes on or after it: step, loss, speed, memory, slow ranks, failures",
    "explain": "one formula with your numbers, and its source",
    "export": "write a job as another framework's configuration, and list what that cannot express",
    "verify": "compare a layout with one process: loss, every gradient, every weight after a few steps",
    "validate": "score the cost model on a table of published or measured runs",
    "dryrun": "trace the engine on one rank of any world size: memory, collectives, FLOPs, against the plan",
    "data": "build token shards from text, JSON lines, Parquet or tars; check and show shards",
    "checkpoint": "inspect, verify and reshard checkpoints",
    "convert": "convert weights from and to Hugging Face, torch, DeepSpeed, Megatron-LM; to one file",
    "generate": "continue prompts with a trained model, with a key-value cache, on one rank or several",
    "bench": "time collectives, one training step, or parameter servers on this machine, against the prediction",
    "compare": "compare a profiled run with its prediction: every part of the step, slow ranks and links, causes",
    "report": "a job or a run as one HTML file: the verdict, and every picture with its table",
    "calibrate": "measure this machine as a cluster to plan with; rebalance the stages of a profiled run",
    "doctor": "check that this machine is fit for a long run: ports, memory, clocks, disk, an all-reduce",
    "lab": "learn by measuring: theory beside measurement on this machine, and a failure where they contradict",
    "list": "show the catalogue: models, devices, links, clusters, stacks, schedules, collectives",
    "completion": "complete verbs, flags and values in bash, zsh or fish",
}
_NODE_VARIABLES = ("PET_NODE_RANK", "SKYPILOT_NODE_RANK")  # set by launchers that start one process per node
MODULES = {"list": "listing"}  # where the name is not the verb's

_HELP = """usage: shardwise VERB [options]

Plan, run and measure distributed training of large language models.

{verbs}

`shardwise VERB --help` explains a verb, with an example that works as printed.
The exit status is 0; 1 if a job does not fit its devices or a check fails; 2 for bad input.
"""


# Modules and prices are many objects and no garbage: looking for cycles among them as often as Python does by itself
# would be a thirtieth of what `analyze` takes. Training collects between its steps.
_OBJECTS_BETWEEN_COLLECTIONS = 50_000

# Errors of paths that a user may have named, reported in a line; other OSErrors may be our bugs, and keep their trace.
_REFUSED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; the exit status is 0, 1 if a job does not fit or a check fails, 2 for bad input."""
    arguments = sys.argv[1:] if arguments is None else arguments
    gc.set_threshold(_OBJECTS_BETWEEN_COLLECTIONS)
    with piped_streams(sys.stdout, sys.stderr):
        try:
            status = _run(arguments)
            with suppress(ReaderGone):
                sys.stdout.flush()
            return status
        except SpecError as error:
            return _told(in_flags(_by_flag(error, arguments).line), error.status)
        except OSError as error:
            from shardwise.run.storage.stores import StoreError  # only now: most verbs touch no store

            if isinstance(error, StoreError):
                return _told(f"{error.filename}: {error.strerror}; check the store and the network")
            if error.errno not in _REFUSED:
                raise
            return _told(f"{shown(error.filename, 300)}: {error.strerror}; check the path")
        except ReaderGone:
            return 0
        except KeyboardInterrupt:
            return 130


def _by_flag(error: SpecError, arguments: list[str]) -> SpecError:
    """The same mistake; a field that the command has set by a flag is called by that flag."""
    from shardwise.api.run_options import option_paths
    from shardwise.spec.fields import job_fields

    flags = {path: record.flag for path, record in job_fields().items()}
    flags |= {path: f"--{name.replace('_', '-')}" for name, path in option_paths().items()}
    path, bracket, place = error.field.partition("[")
    flag = flags.get(path)
    if not flag or flag not in (argument.partition("=")[0] for argument in arguments):
        return error
    return type(error)(f"{flag}{bracket}{place}", error.problem, error.remedy)


def _told(problem: str, exit_status: int = SpecError.status) -> int:
    print(f"shardwise: error: {problem}", file=sys.stderr)
    return exit_status


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_HELP.format(verbs="\n".join(_verb_lines(shutil.get_terminal_size().columns))))
        return 0
    if arguments[0] in ("-V", "--version"):
        from shardwise import __version__

        print(f"shardwise {__version__}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        raise SpecError("", f"unknown verb {verb!r}", nearest_name(verb, VERBS))
    if any(name in os.environ for name in _NODE_VARIABLES) and (status := _on_node(arguments)) is not None:
        return status
    module = importlib.import_module(f"shardwise.cli.{MODULES.get(verb, verb)}")
    done: int = module.run(rest)
    return done


def _on_node(arguments: list[str]) -> int | None:
    """The exit status of the ranks of this node, if this is its only process; None otherwise."""
    from shardwise.launch.node import VERBS as RANK_VERBS
    from shardwise.launch.node import run_on_node
    from shardwise.run.environment import started_node

    node = started_node() if arguments[0] in RANK_VERBS and not {"-h", "--help"} & set(arguments) else None
    return None if node is None else run_on_node(node, arguments)


def _verb_lines(width: int) -> Iterator[str]:
    """What each verb does, wrapped on narrow terminals."""
    for verb, what in VERBS.items():
        yield textwrap.fill(what, max(40, width - 1), initial_indent=f"  {verb:<10} ", subsequent_indent=" " * 13)


if __name__ == "__main__":
    raise SystemExit(main())
