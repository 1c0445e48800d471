"""`train`: one call from a job to a trained model on this machine; called again, it resumes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from shardwise.api.given import JobArguments, JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import decided_job, source_of
from shardwise.api.results import Figure, Result, Rows
from shardwise.api.run_options import RunKeywords, RunOptions, RunPlace, on_with_address, require_compatible
from shardwise.interop.companions import folder_of_model
from shardwise.interop.jobs import is_folder, located
from shardwise.launch.elastic import FindsRecuts
from shardwise.launch.local import DEBUG
from shardwise.launch.observe.prometheus import MetricsServer
from shardwise.launch.outcome import Failure, Outcome
from shardwise.launch.preflight import Preflight, preflight
from shardwise.launch.resume import finished_at, folder_for, on_nodes, require_same_run
from shardwise.launch.run import Launch, prepare
from shardwise.launch.targets.registry import TargetRequest, started_on
from shardwise.report.page import Page
from shardwise.report.progress import LONG_SECONDS
from shardwise.report.status import training_data, training_page
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.environment import Started, started
from shardwise.run.metrics.lines import RunSummary
from shardwise.run.storage.place import absolute
from shardwise.spec.errors import SpecError
from shardwise.spec.files import read_yaml
from shardwise.spec.installation import require_packages
from shardwise.spec.job import Job
from shardwise.spec.units import counted, readable_duration, readable_seconds

OnProgress = Callable[[str], None]
Watch = Callable[[RunFolder, Job], AbstractContextManager[Any]]


@dataclass(frozen=True)
class TrainingResult(Result):
    """How a run ended."""

    verb = "train"
    job: Job
    summary: RunSummary
    outcome: Outcome | None
    """None if all steps had been done before."""

    @property
    def ok(self) -> bool:
        return self.status == 0

    @property
    def status(self) -> int:
        """The command's exit status: 0 done, 1 failed, 2 a mistake, 76 stopped with a checkpoint, 75 without."""
        return 0 if self.outcome is None else self.outcome.status

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it before its last step: called again, it resumes."""
        return self.outcome is not None and self.outcome.stopped

    @property
    def folder(self) -> Path:
        """Where the run is kept: checkpoints, metrics, logs."""
        return Path(str(self.job.run.folder))

    @property
    def failure(self) -> Failure | None:
        return None if self.outcome is None or self.ok else self.outcome.failure

    measured_seconds = Figure[float | None]("summary.step_seconds", "The median step time of the run.")
    predicted_seconds = Figure[float | None]("summary.predicted_seconds")

    @cached_property
    def page(self) -> Page:
        return training_page(self.summary, self.job, self.outcome)

    def _data(self) -> dict[str, Any]:
        return training_data(self.summary, self.outcome)

    def tables(self) -> Mapping[str, Rows]:
        from shardwise.run.metrics.lines import read_lines

        return {"metrics": list(read_lines(RunFolder(self.folder).metrics)), "summary": [self._data()]}


class TrainKeywords(RunKeywords, JobKeywords, total=False):
    """Options of a run, and keywords that describe its job."""


def train(
    job: JobSource | None = None,
    *,
    ray_address: str | None = None,
    on_progress: OnProgress | None = None,
    **keywords: Unpack[TrainKeywords],
) -> TrainingResult:
    """Prices the job, starts one process per device, trains, and restarts after a failure.

    Called by every rank that torchrun, srun or mpirun started, it trains as these ranks and starts none.
    Everything is kept in ``run_folder``: called again with the same folder, it resumes from the last checkpoint. A
    failed run is a result with ``ok`` False, not an error. ``on`` names a file of hosts to start the processes on, over
    ssh, or `ray`: a cluster at RAY_ADDRESS or `ray,address=...`, or one of this machine. It waits for devices that are
    missing (``wait_for_resources``, `run.restarts.wait`), then continues with fewer, at least ``least_devices``
    (`run.restarts.shrink`), and with more when they return. ``profile`` and ``nvtx`` name steps, as in "steps=10:12":
    to record for `compare`, or to mark as NVTX ranges. ``metrics_port`` serves the run's state to Prometheus on
    loopback while it trains. ``on_progress`` is called with notes and events.
    """
    report, here = on_progress or (lambda text: None), started()
    given: dict[str, Any] = {**keywords, "on": on_with_address(keywords.get("on"), ray_address)}
    options = RunOptions.taken_from(given)
    place = RunPlace.of(options.on, here)
    require_compatible([name for name, value in given.items() if value], place)
    if place.target is not None and place.target.kind != "starts":
        problem = f"{place.target.name} writes a file and starts nothing"
        raise SpecError("⟨on⟩", problem, "`shardwise train --on` writes it")
    of_job = {name: value for name, value in given.items() if name not in RunKeywords.__annotations__}

    def ready(hosts: Sequence[str] | None) -> ReadyRun:
        return ready_run(options.over(job_arguments(job, of_job)), options, place, hosts=hosts, note=report)

    if here is not None:
        return trained_as_rank(here, ready, debug=options.debug)

    return trained(ready(place.host_names()), lambda launch: launch.supervised(lambda event: report(str(event))))


@dataclass(frozen=True)
class ReadyRun:
    """A checked job in its folder."""

    job: Job
    folder: RunFolder
    checked: Preflight
    named_model: Any
    """The model as the caller gave it."""
    options: RunOptions
    place: RunPlace
    note: OnProgress

    def finished_step(self) -> int | None:
        """Prepares the folder to begin or to resume; returns the last step if all are done."""
        for note in require_same_run(self.job, self.folder, go_on=self.options.go_on):
            self.note(note)
        step = finished_at(self.job, self.folder)
        if step is None:
            if not self.place.printed:
                from shardwise.training.checkpoint.load import require_resumable  # imports torch

                require_resumable(self.job, self.folder.checkpoints)
            prepare(self.job, self.folder, self.checked, folder_of_model(self.named_model))
        return step


def trained(ready: ReadyRun, supervised: Callable[[Launch], Outcome]) -> TrainingResult:
    """Trains unless all steps are done; the ranks are started here or on the run's target."""
    port = ready.job.run.logging.metrics_port
    with ExitStack() as stack:
        server = None if port is None else stack.enter_context(MetricsServer(port, "run.logging.metrics_port"))
        stack.enter_context(ready.folder.checkpoints.locked())
        step = ready.finished_step()
        if step is not None:
            return TrainingResult(ready.job, run_summary(ready.folder, step), None)
        if server is not None:
            ready.note(f"metrics at {server.url}")
        recuts = _recuts(ready.job, ready.folder)
        options, target = ready.options, ready.place.target
        launch = Launch(ready.job, ready.folder, options.grace_seconds, options.debug, metrics=server, recuts=recuts)
        if target is not None:
            launched = stack.enter_context(started_on(TargetRequest(target, ready.job, ready.folder.path)))
            for text in launched.notes:
                ready.note(text)
            launch = replace(launch, target=launched)
        outcome = supervised(launch)
    return TrainingResult(ready.job, run_summary(ready.folder, None), outcome)


def _recuts(job: Job, folder: RunFolder) -> FindsRecuts | None:
    if job.run.recut is None:
        return None
    from shardwise.measure.recut import RunRecuts  # imports torch

    return RunRecuts(folder, job.run.recut)


def ready_run(
    given: JobArguments, options: RunOptions, place: RunPlace, *, hosts: Sequence[str] | None = None, note: OnProgress
) -> ReadyRun:
    """The job, completed, checked and given a folder. ``hosts`` are the nodes, if their names are known.

    ``given`` has the fields that the options set already (`RunOptions.over`).
    """
    assert options.over(given) == given
    job, notes = job_for(given, place)
    job = _with_absolute_paths(job)
    started_as, elsewhere = place.started_as, place.target is not None
    require_packages("train", "torch", "safetensors")
    if started_as is not None:
        _require_world(job, started_as)
    for text in notes:
        note(text)
    if job.run.emulate is not None:
        _check_emulation(job, here=place.is_here, note=note)
    job, placing = on_nodes(job, hosts, started=started_as is not None)
    for text in placing:
        note(text)
    checked = preflight(job, here=not place.printed, started=started_as, elsewhere=elsewhere)
    job = _placed(job, given, go_on=options.go_on, note=note)
    folder = RunFolder(Path(str(job.run.folder)), job.run)
    if place.is_here:
        from shardwise.launch.preflight import with_fitting_microbatch

        fitting = with_fitting_microbatch(job, folder, note)
        job, checked = fitting, checked if fitting == job else preflight(fitting, started=started_as)
    for text in (
        *checked.notes,
        *_weights_left(given.overrides.get("model"), job),
        *_how_long(job, checked.price.step_seconds),
    ):
        note(text)
    return ReadyRun(job, folder, checked, _named_model(given), options, place, note)


def job_for(given: JobArguments, place: RunPlace) -> tuple[Job, list[str]]:
    job, notes = decided_job(given, trains=True)
    restarts = job.run.restarts
    if restarts.shrink and restarts.least_devices > job.strategy.world:
        problem = f"{restarts.least_devices}, and the job has {job.strategy.world}"
        raise SpecError("run.restarts.least_devices", problem, "use at most as many")
    if job.run.logging.metrics_port is not None and place.other_launcher is not None:
        problem = f"is served by `shardwise train`, and {place.other_launcher} starts these"  # so nobody would serve it
        remedy = "leave it out; `shardwise status RUN --metrics-port N` serves any run"
        raise SpecError("run.logging.metrics_port", problem, remedy)
    return job, notes


def job_for_manifest(given: JobArguments, place: RunPlace, note: OnProgress) -> tuple[Job, str]:
    """The job for nodes that share no storage with this machine, and a name for its run: from its folder or file, else
    the model's. It is completed and priced here, its files are checked there: paths stay as given.
    """
    job, notes = job_for(given, place)
    if job.run.emulate is not None:
        raise SpecError("run.emulate", "puts the ranks on virtual nodes of this machine", "leave it out")
    if job.run.backend != "auto":
        raise SpecError("run.backend", f"{job.run.backend} is for ranks that mpirun starts", "leave it out")
    checked = preflight(job, here=False)
    for text in (*notes, *checked.notes):
        note(text)
    named = job.run.folder or given.file
    return job, Path(named).stem if named else job.model.name or "run"


def _how_long(job: Job, step_seconds: float) -> list[str]:
    steps = job.run.last_step
    if steps * step_seconds < LONG_SECONDS:
        return []
    whole = readable_duration(steps * step_seconds)
    return [f"this run is predicted to take {whole}: {counted(steps, 'step')} of {readable_seconds(step_seconds)}"]


def trained_as_rank(
    here: Started,
    ready: Callable[[Sequence[str] | None], ReadyRun],
    watch: Watch = lambda folder, job: nullcontext(),
    *,
    debug: bool = False,
) -> TrainingResult:
    """Trains as the rank that this process was started as. Rank 0 prepares the folder, the others wait for it.

    Rank 0 enters ``watch(folder, job)`` while it trains. If a rank fails, the launcher ends the others.
    """
    if debug:
        os.environ.update(DEBUG)
    from shardwise.launch.run import Prepared, follow, lead

    def prepared(hosts: Sequence[str]) -> Prepared:
        prepared_run = ready(hosts)
        with prepared_run.folder.checkpoints.locked():
            step = prepared_run.finished_step()
            return Prepared(str(prepared_run.folder.path.resolve()), prepared_run.job.to_yaml(), step)

    begin = lead(here, prepared) if here.rank == 0 else follow(here)
    folder = RunFolder(Path(begin.folder))
    job = Job.from_dict(read_yaml(folder.job, "job file"))
    outcome = None
    if begin.finished_step is None:
        with watch(folder, job) if here.rank == 0 else nullcontext():
            outcome = begin.train(here)
    return TrainingResult(job, run_summary(folder, begin.finished_step), outcome)


def _require_world(job: Job, here: Started) -> None:
    if job.run.emulate is not None:
        raise SpecError("run.emulate", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    if job.strategy.world != here.world:
        problem = f"the job has {job.strategy.world:,} ranks, {here.launcher} started {here.world:,}"
        raise SpecError("cluster", problem, "start as many as the job has")


def run_summary(folder: RunFolder, finished_step: int | None) -> RunSummary:
    """The figures of a run; the last step of a finished run is its checkpoint's, which the metrics may lack."""
    from shardwise.run.metrics.lines import read_lines, summarise

    summary = summarise(read_lines(folder.metrics))
    return summary if finished_step is None else replace(summary, steps=finished_step)


def _with_absolute_paths(job: Job) -> Job:
    """As the workers need them."""
    run = job.run
    kept, begun = run.checkpoints.folder, run.start_from
    data = replace(
        run.data, shards=tuple(map(absolute, run.data.shards)), validation=tuple(map(absolute, run.data.validation))
    )
    checkpoints = replace(run.checkpoints, folder=None if kept is None else absolute(kept))
    start_from = None if begun is None else absolute(begun)
    return replace(job, run=replace(run, data=data, checkpoints=checkpoints, start_from=start_from))


def _weights_left(named: Any, job: Job) -> list[str]:
    """A note if the model is a folder whose weights are not used: the user may have meant to start from them."""
    folder = located(named)
    if job.run.start_from is not None or not isinstance(folder, str) or not is_folder(folder):
        return []
    if not any(Path(folder).glob("*.safetensors")):
        return []
    return [f"weights are random; --set run.start_from={folder} begins with those in the folder"]


def _check_emulation(job: Job, *, here: bool, note: OnProgress) -> None:
    from shardwise.launch.emulate.network import require_emulation

    emulation = job.run.emulate
    assert emulation is not None
    if not here:
        raise SpecError("run.emulate", "puts the ranks on virtual nodes of this machine", "leave it out")
    require_emulation()
    if job.cluster.node_devices != emulation.ranks_per_node:
        there = f"{job.cluster.name} has nodes of {job.cluster.node_devices}"
        note(f"{there}: the prediction is not for {emulation}")


def _placed(job: Job, given: JobArguments, *, go_on: bool, note: OnProgress) -> Job:
    """The job with a folder; the default is changed if it has another job's run."""
    if job.run.folder is not None:
        return job
    default = Path("runs") / (Path(given.file).stem if given.file else job.model.name or "run")
    path, why = (default, []) if go_on else folder_for(job, default)
    if why:
        note(f"{default} has the run of another job ({why[0]}): this one is in {path}")
    return replace(job, run=replace(job.run, folder=str(path)))


def _named_model(given: JobArguments) -> Any:
    source = source_of(given)
    return given.overrides.get("model", source.get("model") if isinstance(source, Mapping) else None)
