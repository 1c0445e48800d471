"""`--on ray`: a file of prompts through three stages of Ray Data.

CPU actors tokenise, model actors generate, CPU actors make lines of text; this process writes them.

A row is a batch, the same as without Ray, so that the file is the same too. Rows come back in order. Ray restarts a
lost actor and gives it its rows again; each row is written once, when it arrives here.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from shardwise.generation.files import PartialFile, PromptRecord, batch_offsets, read_prompts
from shardwise.generation.ranks import Clock, Done, Emit, run_batch
from shardwise.generation.ray_driver import REMEDY, StageFailed, run_driver
from shardwise.generation.request import Generated, GenerationRequest, GenerationTimes
from shardwise.generation.served import RankGone, ServedModel
from shardwise.launch.ray.cluster import ADDRESS, ray_cluster
from shardwise.launch.targets.agent import installed, require_same
from shardwise.run.data.token_files import tokenizer_from
from shardwise.spec.errors import DoesNotFit, SpecError, shown
from shardwise.spec.installation import require_packages
from shardwise.spec.units import counted

CPU_STAGE_CORES = 0.5  # they wait for the model most of the time
WORKERS_PER_CPU_ACTOR = 8
ROWS_AHEAD = 4  # per worker, that may wait for a stage, however long the file is
_ROWS, _POLICIES = "shardwise.rows_ahead", "backpressure_policies.enabled"
_AHEAD = 2  # rows that wait at an actor while it works
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class RayPrompts:
    """Reads ``data`` and writes ``out`` as `PromptFile` does, by models on a Ray cluster."""

    data: str
    out: str
    tokenizer: str | None
    about: Mapping[str, Any]
    address: str | None  # of the cluster
    wait_seconds: float  # how long the cluster may take to make room
    replicas: int | None  # models; None for one on every GPU

    def run(self, request: GenerationRequest, emit: Emit) -> Done:
        """Raises SpecError if nodes differ, or the cluster is lost; DoesNotFit if there is no room in time."""
        require_packages("⟨on=ray⟩", "ray", "pandas")
        return [], run_driver(partial(self.times, request), emit)

    def times(self, request: GenerationRequest, emit: Emit) -> GenerationTimes:
        """The work, in the driver of Ray."""
        address = self.address or os.environ.get(ADDRESS)
        wanted = _Wanted(self.replicas or 1, request.device, request.tp)
        cores = len(os.sched_getaffinity(0))
        part = PartialFile(Path(self.out), self.about)
        with part.opened(), ray_cluster(address, max(cores, wanted.whole_cores)):
            if self.replicas is None:
                wanted = wanted.for_cluster()
            wanted.wait(self.wait_seconds)
            done = part.whole_batches(request.batch)
            emit(done)
            batches = self._streamed(request, wanted, done)
            times = _written(batches, part, done, emit)
            part.complete()
        return times

    def _streamed(self, request: GenerationRequest, wanted: _Wanted, done: int) -> Iterator[Mapping[str, Any]]:
        """Rows with the lines of each batch, in order."""
        import ray.data

        offsets = batch_offsets(Path(self.data), request.batch)[done // request.batch :]
        rows = [
            {"first": done + number * request.batch, "offset": offset, "count": request.batch}
            for number, offset in enumerate(offsets)
        ]
        if not rows:
            return iter(())
        _configure(ray.data.DataContext.get_current(), ROWS_AHEAD * wanted.workers)
        facts = _Facts.here(Path(self.data))
        stages = ray.data.from_items(rows, override_num_blocks=len(rows))
        for stage, given, count, resources in (
            (Tokenise, (self.data, self.tokenizer), wanted.cpu_actors, {"num_cpus": CPU_STAGE_CORES}),
            (Generate, (request,), wanted.workers, wanted.model_resources),
            (WriteText, (self.tokenizer,), wanted.cpu_actors, {"num_cpus": CPU_STAGE_CORES}),
        ):
            pool = ray.data.ActorPoolStrategy(size=count, max_tasks_in_flight_per_actor=_AHEAD)
            stages = stages.map(stage, fn_constructor_args=(facts, *given), compute=pool, **resources)
        return _rows(stages)


def _rows(stages: Any) -> Iterator[Mapping[str, Any]]:
    """The rows of the last stage; raises SpecError if a stage refused its work or failed, not if an actor was lost."""
    import ray

    try:
        yield from stages.iter_rows()
    except ray.exceptions.RayError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, SpecError):
            cause = getattr(cause, "cause", None) or cause.__cause__
        if cause is not None:
            raise SpecError(cause.field, cause.problem, cause.remedy) from None
        why = str(error).strip().splitlines()[-1]
        raise StageFailed("⟨on=ray⟩", f"a stage failed ({shown(why, 200)})", REMEDY) from None


def _configure(context: Any, rows_ahead: int) -> None:
    """Keeps rows in order and bounds those that wait between stages; Ray's own progress bars are off."""
    from ray.data._internal.execution import backpressure_policy as of_ray

    class FewRowsAhead(of_ray.BackpressurePolicy):  # type: ignore[misc]
        """Ray's own policies count bytes, of which our rows have few: it would tokenise the whole file ahead."""

        def can_add_input(self, op: Any) -> bool:
            waiting = [self._topology[after].total_enqueued_input_blocks() for after in op.output_dependencies]
            waiting = waiting or [self._topology[op].total_enqueued_output_blocks()]
            return bool(max(waiting) < self._data_context.get_config(_ROWS))

    context.set_config(_ROWS, rows_ahead)
    context.set_config(_POLICIES, [*of_ray.ENABLED_BACKPRESSURE_POLICIES, FewRowsAhead])
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False


def _written(rows: Iterator[Mapping[str, Any]], part: PartialFile, done: int, emit: Emit) -> GenerationTimes:
    """Writes the batches, which must arrive in order."""
    began, tokens, load, first = time.perf_counter(), 0, 0.0, None
    for row in rows:
        if first is None:
            first, began = float(row["first_token_seconds"]), time.perf_counter() - float(row["seconds"])
        if row["first"] != done:
            raise StageFailed("⟨on=ray⟩", f"the batch from prompt {row['first']} came, not that from {done}", REMEDY)
        part.write(row["lines"])
        done += int(row["count"])
        tokens += int(row["tokens"])
        load = max(load, float(row["load_seconds"]))
        emit(done)
    return GenerationTimes(load, first or 0.0, time.perf_counter() - began, tokens)


# -- what a cluster must have ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wanted:
    """The resources that the actors of all stages need."""

    workers: int
    device: str
    tp: int = 1  # devices of a model, all on one node

    @property
    def cpu_actors(self) -> int:
        return -(-self.workers // WORKERS_PER_CPU_ACTOR)

    @property
    def whole_cores(self) -> int:
        return self.workers * self.tp + math.ceil(2 * self.cpu_actors * CPU_STAGE_CORES)

    @property
    def model_resources(self) -> dict[str, float]:
        return {"num_cpus": self.tp, **({"num_gpus": self.tp} if self.device == "cuda" else {})}

    def for_cluster(self) -> _Wanted:
        """As many models as there are GPUs for; one on CPUs."""
        return replace(self, workers=max(1, self._places() if self.device == "cuda" else 1))

    def _places(self) -> int:
        """How many models fit on the nodes, busy or not, each on one node."""
        import ray

        device = "GPU" if self.device == "cuda" else "CPU"
        return sum(int(node["Resources"].get(device, 0)) // self.tp for node in ray.nodes() if node["Alive"])

    def wait(self, seconds: float) -> None:
        """Raises DoesNotFit if there is no room in time."""
        import ray

        needed = {"CPU": self.whole_cores, **({"GPU": self.workers * self.tp} if self.device == "cuda" else {})}
        deadline = time.monotonic() + seconds
        while True:
            free = ray.available_resources()
            if all(free.get(name, 0) >= count for name, count in needed.items()) and self._places() >= self.workers:
                return
            if time.monotonic() >= deadline:
                asked = " and ".join(counted(count, name) for name, count in needed.items())
                there = " and ".join(f"{int(ray.cluster_resources().get(name, 0))} {name}s" for name in needed)
                unused = " and ".join(f"{int(free.get(name, 0))}" for name in needed)
                models = counted(self.workers, "model actor")
                if self.tp > 1:
                    models += f" of {self.tp} ranks on one node"
                problem = (
                    f"no place for {models} within {seconds:g} s: asked for {asked}; present: {there}, of which "
                    f"{unused} are free"
                )
                raise DoesNotFit("⟨on=ray⟩", problem, "use fewer (⟨replicas⟩), wait (⟨wait_for_resources⟩), add nodes")
            time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True)
class _Facts:
    """What all nodes must have in common: code, versions and the file of prompts."""

    expected: Mapping[str, str]

    @classmethod
    def here(cls, data: Path) -> _Facts:
        return cls(_facts(data))

    def require(self, data: Path) -> None:
        import ray

        there = ray.util.get_node_ip_address()
        require_same(self.expected, _facts(data), there)


def _facts(data: Path) -> dict[str, str]:
    size = f"{data.stat().st_size} bytes" if data.is_file() else "missing"
    return {**installed(data.parent), str(data): size}


# -- the stages, in the processes of Ray -------------------------------------------------------------------


class Tokenise:
    """Stage that reads the prompts of a batch as tokens."""

    def __init__(self, facts: _Facts, data: str, tokenizer: str | None) -> None:
        self._data = Path(data)
        facts.require(self._data)
        self._tokenizer = None if tokenizer is None else tokenizer_from(tokenizer)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        prompts = read_prompts(self._data, self._tokenizer, int(row["offset"]))
        records = [record for _, record in islice(prompts, int(row["count"]))]
        return {"first": row["first"], "count": len(records), "records": pickle.dumps(records)}


class OneRank:
    """A whole model in this process, as `ServedModel` has it on several ranks."""

    def __init__(self, request: GenerationRequest) -> None:
        from shardwise.generation.ranks import loaded, opened_weights

        began = time.perf_counter()
        self._request = request
        self._model = loaded(opened_weights(request), 1, request.device)
        self._load_seconds = time.perf_counter() - began

    def run_batch(self, prompts: Sequence[Sequence[int]], first: int) -> Done:
        clock = Clock(self._load_seconds)
        return run_batch(self._model, prompts, self._request, first, clock, lambda step: None), clock.times()


class Generate:
    """Stage that generates the tokens after the prompts of a batch, by a model on one or several ranks."""

    def __init__(self, facts: _Facts, request: GenerationRequest) -> None:
        self._model = OneRank(request) if request.tp == 1 else ServedModel(request)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        records: Sequence[PromptRecord] = pickle.loads(row["records"])
        try:
            generated, times = self._model.run_batch([record.tokens for record in records], int(row["first"]))
        except RankGone:
            os._exit(1)  # Ray restarts a lost actor and its rows; an error would end everything
        return {
            **row,
            "generated": pickle.dumps(generated),
            "tokens": times.tokens,
            "seconds": times.seconds,
            "load_seconds": times.load_seconds,
            "first_token_seconds": times.first_token_seconds,
        }


class WriteText:
    """Stage that makes a batch's lines of the file."""

    def __init__(self, facts: _Facts, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else tokenizer_from(tokenizer)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        records: Sequence[PromptRecord] = pickle.loads(row["records"])
        generated: Sequence[Generated] = pickle.loads(row["generated"])
        lines = b"".join(record.line(text, self._tokenizer) for record, text in zip(records, generated))
        return {**{name: value for name, value in row.items() if name not in ("records", "generated")}, "lines": lines}
