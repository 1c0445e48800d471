"""The state of a run for Prometheus: its text format, and a small server on loopback.

The format is version 0.0.4: https://prometheus.io/docs/instrumenting/exposition_formats/. It is written by hand: all
figures are read from the run's folder, and a client library would only add a registry of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from typing import Literal, get_args

from shardwise.launch.loopback import LOOPBACK, MOST_SECONDS, LoopbackServer, refusal
from shardwise.launch.observe.state import RunObserver, RunState, Word
from shardwise.run.checkpoint.folder import RunFolder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATH = "/metrics"


@dataclass(frozen=True)
class Metric:
    """A name, its meaning, and a value per set of labels; a counter never falls while its run goes on."""

    name: str
    meaning: str
    samples: tuple[tuple[Mapping[str, str], float], ...]
    kind: Literal["gauge", "counter"] = "gauge"


def metrics_of(state: RunState) -> Iterator[Metric]:
    figures, job = state.figures, state.job
    model = "" if job is None else str(job.model.name)
    yield Metric("run_info", "The run and its model.", (({"run": state.folder, "model": model}, 1.0),))
    words = tuple(({"state": word}, float(word == state.state)) for word in get_args(Word))
    yield Metric("run_state", "1 for the state that the run is in.", words)
    yield from _known(
        ("step", "Steps done.", float(state.step)),
        ("steps_planned", "Steps of the whole run.", state.steps),
        ("loss", "Training loss of the newest step.", figures.loss),
        ("validation_loss", "Loss on held-out data, newest evaluation.", figures.validation_loss),
        ("tokens_per_second", "Tokens trained in a second, newest step.", figures.tokens_per_second),
        ("step_seconds", "Median time of the newest steps.", figures.step_seconds),
        ("predicted_step_seconds", "The plan's step time.", figures.predicted_seconds),
        ("mfu_ratio", "Model FLOPs utilisation of the newest step.", figures.mfu),
        ("goodput_ratio", "Share of the run's time spent in steps that count.", state.goodput),
        ("left_seconds", "Time to the last step at the present pace.", state.left_seconds),
        ("last_step_age_seconds", "Time since the newest step was recorded.", state.quiet_seconds),
        ("predicted_memory_bytes", "The plan's memory of the fullest rank.", figures.predicted_memory_bytes),
    )
    if state.saved is not None:
        yield from _known(
            ("commit_step", "Step of the newest checkpoint.", float(state.saved.step)),
            ("commit_age_seconds", "Age of the newest checkpoint.", state.saved.age_seconds),
        )
    yield Metric("restarts_total", "Restarts after a failure.", (({}, float(state.restarts)),), "counter")
    if figures.memory_bytes_of_ranks:
        each = tuple((_rank(rank), float(size)) for rank, size in enumerate(figures.memory_bytes_of_ranks))
        yield Metric("memory_bytes", "Peak bytes in tensors of a rank, when last counted.", each)
    if state.ranks:
        yield Metric(
            "rank_silent_seconds",
            "Time since a rank's last heartbeat.",
            tuple((_rank(rank.rank), rank.silent_seconds) for rank in state.ranks),
        )
    if state.late:
        late = tuple((_rank(rank.rank), rank.share) for rank in state.late)
        yield Metric("rank_late_ratio", "Share of the time that others wait for a rank in collectives.", late)
        slow = tuple((_rank(rank.rank), float(rank.straggles)) for rank in state.late)
        yield Metric("straggler", "1 for a rank that the others wait for.", slow)


def _known(*figures: tuple[str, str, float | None]) -> Iterator[Metric]:
    for name, meaning, value in figures:
        if value is not None:
            yield Metric(name, meaning, (({}, float(value)),))


def _rank(rank: int) -> dict[str, str]:
    return {"rank": str(rank)}


def exposition(metrics: Iterable[Metric]) -> str:
    """The text that Prometheus scrapes; every name begins with ``shardwise_``."""
    lines = []
    for metric in metrics:
        name = f"shardwise_{metric.name}"
        lines += [f"# HELP {name} {_escaped(metric.meaning)}", f"# TYPE {name} {metric.kind}"]
        lines += [f"{name}{_labels(labels)} {_number(value)}" for labels, value in metric.samples]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items()) + "}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    escaped = text.replace("\\", "\\\\").replace("\n", "\\n")
    return escaped.replace('"', '\\"') if quotes else escaped


def _number(value: float) -> str:
    """As Go reads it; whole numbers without a fraction."""
    return str(int(value)) if value.is_integer() else repr(value)


# -- the server ------------------------------------------------------------------------------------


class MetricsServer(LoopbackServer):
    """Bound to loopback on creation, answering during `serving`; ``port`` 0 takes any free one."""

    def __init__(self, port: int, field: str) -> None:
        super().__init__(port, field, _Handler)
        self.text: Callable[[], str] = lambda: ""
        self.hosts: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}{PATH}"

    @contextmanager
    def serving(self, folder: RunFolder) -> Iterator[None]:
        """Answers in a thread with the state of the run, read anew for each request."""
        observer, one_at_a_time = RunObserver(folder), threading.Lock()

        def text() -> str:
            with one_at_a_time:
                return exposition(metrics_of(observer.state()))

        job = observer.job()
        self.text, self.hosts = text, () if job is None else job.run.logging.metrics_hosts
        thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            self.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = "shardwise"
    timeout = MOST_SECONDS  # for the client to send something, and to take the answer

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        self.server.request_came(self.request)
        hosts, origins = self.headers.get_all("Host", []), self.headers.get_all("Origin", [])
        if refused := refusal(hosts, origins, self.server.hosts):
            self.send_error(refused.status, explain=refused.text)
            return
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, "only /metrics is here")
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing: the terminal belongs to the progress bar."""
