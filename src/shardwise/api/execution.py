"""`train`: one call from a job to a trained model on this machine; called again, it resumes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Unpack

from shardwise.api.given import JobArguments, JobKeywords, JobSource, job_arguments
from shardwise.api.inputs import job_from
from shardwise.api.quantities import whole_number
from shardwise.api.results import Figure, Result, Rows
from shardwise.interop.companions import folder_of_model
from shardwise.interop.jobs import is_folder, other_framework, read_job_fields
from shardwise.launch.elastic import FindsRecuts
from shardwise.launch.job_file import on_nodes
from shardwise.launch.local import DEBUG
from shardwise.launch.observe.prometheus import MetricsServer
from shardwise.launch.outcome import Event, Failure, Outcome
from shardwise.launch.preflight import Preflight, preflight
from shardwise.launch.resume import finished_at, folder_for, require_same_run
from shardwise.launch.run import Launch, prepare
from shardwise.launch.targets.registry import LaunchTarget, TargetRequest, hosts_named, started_on, target_named
from shardwise.report.page import Page
from shardwise.report.progress import LONG_SECONDS
from shardwise.report.status import training_data, training_page
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.environment import Started, started
from shardwise.run.metrics.lines import RunSummary
from shardwise.run.storage.place import absolute
from shardwise.spec.bare import Size
from shardwise.spec.emulation import Emulation
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import read_yaml
from shardwise.spec.installation import require_packages
from shardwise.spec.job import Job
from shardwise.spec.run import Profile, StepWindow
from shardwise.spec.units import counted, parse, readable_duration, readable_seconds

GRACE = "30s"
MOST_PORT = 65535
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


def train(
    job: JobSource | None = None,
    *,
    steps: int | str | None = None,
    run_folder: str | PathLike[str] | None = None,
    data: Sequence[str] = (),
    go_on: bool = False,
    grace: Size = GRACE,
    emulate: str | None = None,
    profile: str | None = None,
    nvtx: str | None = None,
    on: str | None = None,
    ray_address: str | None = None,
    wait_for_resources: Size | None = None,
    least_devices: int | None = None,
    metrics_port: int | None = None,
    debug: bool = False,
    on_progress: OnProgress | None = None,
    **keywords: Unpack[JobKeywords],
) -> TrainingResult:
    """Prices the job, starts one process per device, trains, and restarts after a failure.

    Called by every rank that torchrun, srun or mpirun started, it trains as these ranks and starts none.
    Everything is kept in ``run_folder``: called again with the same folder, it resumes from the last checkpoint. A
    failed run is a result with ``ok`` False, not an error. ``on`` names a file of hosts to start the processes on, over
    ssh, or `ray`: a cluster at ``ray_address`` or RAY_ADDRESS, or one of this machine. It waits for devices that are
    missing (``wait_for_resources``, `run.restarts.wait`), then continues with fewer, at least ``least_devices``
    (`run.restarts.shrink`), and with more when they return. ``profile`` and ``nvtx`` name steps, as in "steps=10:12":
    to record for `compare`, or to mark as NVTX ranges. ``metrics_port`` serves the run's state to Prometheus on
    loopback while it trains. ``on_progress`` is called with notes and events.
    """
    report, here = on_progress or (lambda text: None), started()
    target = None if on is None else starting_target(on, here)
    require_ray_for(ray_address, target)

    def ready(hosts: Sequence[str] | None) -> ReadyRun:
        return ready_run(
            job_arguments(job, keywords), steps=steps, run_folder=run_folder, data=data, go_on=go_on, emulate=emulate,
            profile=profile, nvtx=nvtx, metrics_port=metrics_port, wait_for_resources=wait_for_resources,
            least_devices=least_devices, started_as=here, elsewhere=on is not None, hosts=hosts, note=report,
        )  # fmt: skip

    if here is not None:
        return trained_as_rank(here, ready, debug=debug)

    def report_event(event: Event) -> None:
        report(f"{event.kind}: {event.text}")

    def supervised(launch: Launch) -> Outcome:
        return launch.supervised(report_event)

    prepared = ready(None if target is None else hosts_named(target, str(on)))
    run = supervised if target is None else on_target(target, str(on), prepared, supervised, ray_address)
    return trained(prepared, run, grace=grace, debug=debug)


@dataclass(frozen=True)
class ReadyRun:
    """A checked job in its folder."""

    job: Job
    folder: RunFolder
    checked: Preflight
    named_model: Any
    """The model as the caller gave it."""
    go_on: bool
    """Resume even if data, sequence, batch or optimizer differ."""
    note: OnProgress

    def finished_step(self, *, here: bool = True) -> int | None:
        """Prepares the folder to begin or to resume; returns the last step if all are done."""
        for note in require_same_run(self.job, self.folder, go_on=self.go_on):
            self.note(note)
        step = finished_at(self.job, self.folder)
        if step is None:
            if here:
                from shardwise.training.checkpoint.load import require_resumable  # imports torch

                require_resumable(self.job, self.folder.checkpoints)
            prepare(self.job, self.folder, self.checked, folder_of_model(self.named_model))
        return step


def trained(ready: ReadyRun, run: Callable[[Launch], Outcome], *, grace: Size, debug: bool) -> TrainingResult:
    """Trains unless all steps are done; ``run`` supervises the launch."""
    grace_seconds = float(parse(grace, "seconds", "--grace"))
    port = ready.job.run.logging.metrics_port
    with ExitStack() as stack:
        server = None if port is None else stack.enter_context(MetricsServer(port, "run.logging.metrics_port"))
        stack.enter_context(ready.folder.checkpoints.locked())
        step = ready.finished_step()
        if server is not None and step is None:
            ready.note(f"metrics at {server.url}")
        recuts = _recuts(ready.job, ready.folder)
        launch = Launch(ready.job, ready.folder, grace_seconds, debug, metrics=server, recuts=recuts)
        outcome = run(launch) if step is None else None
    return TrainingResult(ready.job, run_summary(ready.folder, step), outcome)


def _recuts(job: Job, folder: RunFolder) -> FindsRecuts | None:
    if job.run.recut is None:
        return None
    from shardwise.measure.recut import RunRecuts  # imports torch

    return RunRecuts(folder, job.run.recut)


def ready_run(
    given: JobArguments,
    *,
    steps: int | str | None = None,
    run_folder: str | PathLike[str] | None = None,
    data: Sequence[str] = (),
    go_on: bool = False,
    emulate: str | None = None,
    profile: str | None = None,
    nvtx: str | None = None,
    metrics_port: int | str | None = None,
    wait_for_resources: Size | None = None,
    least_devices: int | str | None = None,
    here: bool = True,
    started_as: Started | None = None,
    elsewhere: bool = False,
    hosts: Sequence[str] | None = None,
    note: OnProgress,
) -> ReadyRun:
    """The job, completed, checked and given a folder.

    ``here``: ranks are started by this command, not by commands that it prints. ``started_as``: the rank that this
    process already is. ``elsewhere``: the ranks will be on other hosts. ``hosts``: the nodes, if their names are known.
    """
    fields: dict[str, Any] = {} if steps is None else {"steps": whole_number(steps, "--steps")}
    if emulate is not None:
        fields["emulate"] = Emulation.parse(emulate, "--emulate")
    described, notes = job_from(given, fields)
    job = _shrinking(_completed(described, run_folder, data, profile, nvtx), wait_for_resources, least_devices)
    if metrics_port is not None:
        logging = replace(job.run.logging, metrics_port=port_number(metrics_port))
        job = replace(job, run=replace(job.run, logging=logging))
    if job.run.logging.metrics_port is not None and (started_as is not None or not here):
        raise no_metrics("the ranks" if started_as is None else started_as.launcher)
    require_packages("train", "torch", "safetensors")
    if started_as is not None:
        _require_world(job, started_as)
    for text in notes:
        note(text)
    if job.run.emulate is not None:
        _check_emulation(job, here=here and not elsewhere, note=note)
    job, placing = on_nodes(job, hosts, started=started_as is not None)
    for text in placing:
        note(text)
    checked = preflight(job, here=here, started=started_as, elsewhere=elsewhere)
    job = _placed(job, given, go_on=go_on, note=note)
    folder = RunFolder(Path(str(job.run.folder)), job.run)
    if here and not elsewhere and (started_as is None or started_as.hosts == 1):
        from shardwise.launch.preflight import with_fitting_microbatch

        fitting = with_fitting_microbatch(job, folder, note)
        job, checked = fitting, checked if fitting == job else preflight(fitting, started=started_as)
    for text in (
        *checked.notes,
        *_weights_left(given.overrides.get("model"), job),
        *_how_long(job, checked.price.step_seconds),
    ):
        note(text)
    return ReadyRun(job, folder, checked, _named_model(given), go_on, note)


def _how_long(job: Job, step_seconds: float) -> list[str]:
    """A note on the predicted duration of a long run."""
    steps = job.run.last_step
    if steps * step_seconds < LONG_SECONDS:
        return []
    whole = readable_duration(steps * step_seconds)
    return [f"this run is predicted to take {whole}: {counted(steps, 'step')} of {readable_seconds(step_seconds)}"]


def starting_target(on: str, here: Started | None) -> LaunchTarget:
    """The target of that name, which must start ranks; raises SpecError also if this process is a rank already."""
    target = target_named(on)
    if here is not None:
        raise SpecError("--on", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    if target.kind != "starts":
        raise SpecError("--on", f"{target.name} writes a file and starts nothing", "`shardwise train --on` writes it")
    return target


def require_ray_for(address: str | None, target: LaunchTarget | None) -> None:
    """Raises SpecError for a Ray address without ``--on ray``."""
    if address is not None and (target is None or target.name != "ray"):
        raise SpecError("--ray-address", "is for --on ray", "leave it out")


def _shrinking(job: Job, wait: Size | None, least_devices: int | str | None) -> Job:
    """The job with the flags in its `run.restarts`, checked."""
    restarts = job.run.restarts
    if wait is not None:
        seconds = float(parse(wait, "seconds", "--wait-for-resources"))
        try:
            restarts = replace(restarts, wait=seconds)
        except SpecError as error:
            raise SpecError("--wait-for-resources", error.problem, error.remedy) from None
    if least_devices is not None:
        restarts = replace(restarts, shrink=True, least_devices=whole_number(least_devices, "--least-devices"))
    if restarts.shrink and restarts.least_devices > job.strategy.world:
        name = "run.restarts.least_devices" if least_devices is None else "--least-devices"
        problem = f"{restarts.least_devices}, and the job has {job.strategy.world}"
        raise SpecError(name, problem, "use at most as many")
    return job if restarts == job.run.restarts else replace(job, run=replace(job.run, restarts=restarts))


def on_target(
    target: LaunchTarget,
    on: str,
    ready: ReadyRun,
    supervised: Callable[[Launch], Outcome],
    ray_address: str | None = None,
) -> Callable[[Launch], Outcome]:
    """A function that supervises a launch whose ranks the target starts."""

    def run(launch: Launch) -> Outcome:
        with started_on(target, TargetRequest(on, launch.job, launch.folder.path, ray_address)) as started_target:
            for text in started_target.notes:
                ready.note(text)
            return supervised(replace(launch, target=started_target))

    return run


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
    from shardwise.launch.as_rank import Prepared, follow, lead

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
        raise SpecError("--emulate", f"{here.launcher} has started this as a rank", "leave it out, or start it alone")
    if job.strategy.world != here.world:
        problem = f"the job has {job.strategy.world:,} ranks, {here.launcher} started {here.world:,}"
        raise SpecError("cluster", problem, "start as many as the job has")


def run_summary(folder: RunFolder, finished_step: int | None) -> RunSummary:
    """The figures of a run; the last step of a finished run is its checkpoint's, which the metrics may lack."""
    from shardwise.run.metrics.lines import read_lines, summarise

    summary = summarise(read_lines(folder.metrics))
    return summary if finished_step is None else replace(summary, steps=finished_step)


def _completed(
    job: Job, run_folder: str | PathLike[str] | None, data: Sequence[str], profile: str | None, nvtx: str | None
) -> Job:
    """The job with a folder, and absolute paths for the workers."""
    changes: dict[str, object] = {"folder": str(run_folder) if run_folder else job.run.folder}
    if profile is not None:
        changes["profile"] = Profile.parse(profile, "--profile")
    if nvtx is not None:
        changes["nvtx"] = StepWindow.parse(nvtx, "--nvtx")
    known = job.run.data
    given = (data,) if isinstance(data, str) else tuple(data) or known.shards
    shards = tuple(map(absolute, given))
    if job.run.checkpoints.folder is not None:
        changes["checkpoints"] = replace(job.run.checkpoints, folder=absolute(job.run.checkpoints.folder))
    if job.run.start_from is not None:
        changes["start_from"] = absolute(job.run.start_from)
    try:
        changes["data"] = replace(known, shards=shards, validation=tuple(map(absolute, known.validation)))
        return replace(job, run=replace(job.run, **changes))  # type: ignore[arg-type]
    except SpecError as error:
        raise error.under("run") from None


def port_number(text: int | str, flag: str = "--metrics-port") -> int:
    if not re.fullmatch(r"[0-9]{1,5}", str(text)) or int(text) > MOST_PORT:
        raise SpecError(flag, f"{shown(text)} is not a port", "use 0 (any that is free) to 65535")
    return int(text)


def no_metrics(launcher: str) -> SpecError:
    """The error for a metrics port when another launcher runs the ranks, so that no process here can serve metrics."""
    remedy = "leave it out; `shardwise status RUN --metrics-port N` serves any run"
    return SpecError("run.logging.metrics_port", f"is served by `shardwise train`, and {launcher} starts these", remedy)


def _weights_left(named: Any, job: Job) -> list[str]:
    """A note if the model is a folder whose weights are not used: the user may have meant to start from them."""
    if job.run.start_from is not None or not isinstance(named, str) or not is_folder(named):
        return []
    if not any(Path(named).glob("*.safetensors")):
        return []
    return [f"weights are random; --set run.start_from={named} begins with those in the folder"]


def _check_emulation(job: Job, *, here: bool, note: OnProgress) -> None:
    from shardwise.launch.emulate.network import require_emulation

    emulation = job.run.emulate
    assert emulation is not None
    if not here:
        raise SpecError("--emulate", "puts the ranks on virtual nodes of this machine", "leave it out")
    require_emulation()
    if job.cluster.node_devices != emulation.ranks_per_node:
        there = f"{job.cluster.name} has nodes of {job.cluster.node_devices}"
        note(f"{there}: the prediction is not for {emulation}")


def _placed(job: Job, given: JobArguments, *, go_on: bool, note: OnProgress) -> Job:
    """The job with a folder; the default is changed if it has another job's run."""
    if job.run.folder is not None:
        return job
    default = Path("runs") / (Path(given.job).stem if given.job else job.model.name or "run")
    path, why = (default, []) if go_on else folder_for(job, default)
    if why:
        note(f"{default} has the run of another job ({why[0]}): this one is in {path}")
    return replace(job, run=replace(job.run, folder=str(path)))


def _named_model(given: JobArguments) -> Any:
    if "model" not in given.overrides and given.job and other_framework(given.job) is None:
        return read_job_fields(given.job).get("model")
    return given.overrides.get("model", (given.fields or {}).get("model"))
