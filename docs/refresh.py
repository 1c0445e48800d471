"""Runs every example in the documentation and puts its output where it stands.

An example is a fenced `console` block. Lines from `$ ` on are commands, what follows is output. A comment before the
block says which part of the output is shown, as pieces of text that begin the first line and the line after the last:

    <!-- show: "Memory of".."One step"; "Bound by".. -->

Without a comment all of the output is shown. `python docs/refresh.py` rewrites the documents, `--check` only says
whether they are what the commands print today; `python docs/refresh.py docs/plan.md` is for those named only.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))
DOCUMENTS = ("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "docs/*.md", "docs/labs/*.md")
WIDTH = 132
_TERMINAL = {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
_FOR_A_SHELL = set("|&;<>$`*?~#!(){}\n")

_BLOCK = re.compile(r"(?:<!-- show: (?P<show>.*?) -->\n)?```console\n(?P<body>.*?)```\n", re.DOTALL)
_RANGE = re.compile(r'"(?P<first>[^"]*)"(?:\.\.(?:"(?P<stop>[^"]*)")?)?')
_SHELL = 'shardwise() { "$SHARDWISE_PYTHON" -m shardwise "$@"; }; python() { "$SHARDWISE_PYTHON" "$@"; }; '


@functools.cache
def run(command: str) -> str:
    """What ``command`` prints, on a terminal that is ``WIDTH`` columns wide."""
    plain = command.replace("\\\n", " ")
    is_plain = plain.startswith("shardwise ") and not set(plain) & _FOR_A_SHELL
    status, out, err = _in_process(shlex.split(plain)[1:]) if is_plain else _in_shell(command)
    if status not in (0, 1, 2) or "Traceback" in err:
        raise SystemExit(f"{command}\n{err}")
    return "\n".join(line.rstrip() for line in (out + err).strip("\n").splitlines())


def _in_process(arguments: list[str]) -> tuple[int, str, str]:
    """As the command does, without an interpreter of its own: most of them are done sooner than one has started."""
    from shardwise.cli.main import main as shardwise

    out, err, before = io.StringIO(), io.StringIO(), dict(os.environ)
    os.environ.update(_TERMINAL)
    try:
        with contextlib.chdir(ROOT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = shardwise(arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        os.environ.clear()
        os.environ.update(before)
    return status, out.getvalue(), err.getvalue()


def _in_shell(command: str) -> tuple[int, str, str]:
    own = {"PYTHONPATH": str(ROOT / "src"), "SHARDWISE_PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", "-c", _SHELL + command],
        cwd=ROOT, env={**os.environ, **_TERMINAL, **own}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def selected(output: str, show: str | None) -> list[str]:
    """The lines that ``show`` asks for, with "..." where some are left out."""
    lines = output.splitlines()
    if show is None:
        return lines
    kept: list[str] = []
    end = 0
    for match in _RANGE.finditer(show):
        start = _find(lines, match["first"], end)
        ends_early = ".." in match[0]
        stop = len(lines) if ends_early and match["stop"] is None else start + 1
        if match["stop"] is not None:
            stop = _find(lines, match["stop"], start + 1)
        if start > end:
            kept.append("...")
        piece = lines[start:stop]
        while piece and not piece[-1]:
            piece.pop()
        kept += piece
        end = stop
    return kept + (["..."] if end < len(lines) else [])


def _find(lines: list[str], beginning: str, after: int) -> int:
    """The first line from ``after`` on that begins so, whatever the width of its columns."""
    wanted = " ".join(beginning.split())
    for index in range(after, len(lines)):
        if " ".join(lines[index].split()).startswith(wanted):
            return index
    raise SystemExit(f"no line begins with {beginning!r} in:\n" + "\n".join(lines))


def commands(body: str) -> list[str]:
    """The commands of a block; one that ends in a backslash, or inside quotes, goes on in the next line."""
    found: list[str] = []
    lines = iter(body.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\") or command.count('"') % 2:
                command += "\n" + next(lines)
            found.append(command)
    return found


def refreshed(text: str, run: Callable[[str], str] = run) -> str:
    """The document with the output of its examples as it is today."""

    def replace(match: re.Match[str]) -> str:
        parts: list[str] = []
        for command in commands(match["body"]):
            parts += [f"$ {command}", *selected(run(command), match["show"])]
        comment = f"<!-- show: {match['show']} -->\n" if match["show"] is not None else ""
        return comment + "```console\n" + "\n".join(parts) + "\n```\n"

    return _BLOCK.sub(replace, text)


def main(arguments: list[str], run: Callable[[str], str] = run) -> int:
    stale = []
    for pattern in [one for one in arguments if one != "--check"] or DOCUMENTS:
        paths = sorted(ROOT.glob(pattern))
        if not paths:
            raise SystemExit(f"no document is named {pattern}")
        for path in paths:
            text = path.read_text(encoding="utf-8")
            fresh = refreshed(text, run)
            if fresh == text:
                continue
            stale.append(path.relative_to(ROOT))
            if "--check" not in arguments:
                path.write_text(fresh, encoding="utf-8")
    for path in stale:
        print(f"{'out of date' if '--check' in arguments else 'rewritten'}: {path}")
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
