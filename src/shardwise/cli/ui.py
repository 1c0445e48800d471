"""`shardwise ui`: the page that prices a job while you change it."""

from __future__ import annotations

import argparse
import webbrowser

from shardwise.cli.arguments import add_job_arguments, job_arguments, job_from, port_number
from shardwise.cli.parser import Parser
from shardwise.launch.loopback import LOOPBACK, bound
from shardwise.spec.installation import require_packages

_EXAMPLE = """
shardwise ui
shardwise ui --model llama3-70b --cluster dgx-h100:8 --tp 8 --pp 2 --zero 1 --global-batch 512 --seq 8192 --open
"""
_DOES = """A page on this machine that prices a job while you change it: verdict, memory, timeline, communication, the
nearest published runs, two layouts side by side, the search, exports, and a demo of fine-tuning. It listens on
127.0.0.1 only; the page reads no file of this machine and runs nothing but the demo. It opens with the job that a file
or flags describe."""
_PORT = 8765


def run(arguments: list[str]) -> int:
    parser = Parser(
        "ui", _DOES, _EXAMPLE, "--port --open --model --cluster --gpus --tp --pp --zero --global-batch --seq"
    )
    parser.add_argument("--port", default=str(_PORT), help=f"port on 127.0.0.1 (default {_PORT}; 0: any free one)")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    add_job_arguments(parser)
    parsed = parser.parse(arguments)
    port, state = port_number(parsed.port, "⟨port⟩"), _state(parsed)
    require_packages("ui", "uvicorn", "starlette")
    from shardwise.ui.app import serve

    listening = bound(port, "--port")
    address = f"http://{LOOPBACK}:{listening.getsockname()[1]}/{state}"

    def ready() -> None:
        print(f"shardwise ui: {address} (Ctrl-C ends it)", flush=True)
        if parsed.open:
            webbrowser.open(address)

    serve(listening, ready)
    return 0


def _state(parsed: argparse.Namespace) -> str:
    """The job that the page opens with, as the end of its address; empty if none is given."""
    given = job_arguments(parsed)
    if given == type(given)():
        return ""
    from shardwise.ui.given import fragment, keywords_of

    return f"#{fragment(keywords_of(job_from(parsed)))}"
