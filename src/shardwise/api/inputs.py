"""Makes a `Job` of what a caller gives: presets, files, another framework's configuration, bare numbers, changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.api.bare import bare_cluster, bare_model, bare_model_notes, check_bare_numbers
from shardwise.api.given import JobArguments
from shardwise.api.quantities import whole_number
from shardwise.collectives.cost import check_algorithm
from shardwise.interop.jobs import model_notes, priced_model_from, read_job_fields
from shardwise.interop.kinds import other_framework, require_job
from shardwise.planner.automatic import decided
from shardwise.spec import presets
from shardwise.spec.bare import BareNumbers, StandIn
from shardwise.spec.clusters import cluster_from, job_cluster_from, mixed_kinds
from shardwise.spec.codec import Spec
from shardwise.spec.emulation import EMULATED, cluster_of, emulation_from
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.hardware import Cluster
from shardwise.spec.installation import precision_notes
from shardwise.spec.job import Job, names_precision
from shardwise.spec.model import Model
from shardwise.spec.rules import sequence_note
from shardwise.spec.run import Run, fitting_run
from shardwise.spec.stack import Stack, default_stack, stack_from
from shardwise.spec.strategy import AUTO, Overlap, Strategy, without_auto
from shardwise.spec.training import Training

if TYPE_CHECKING:
    from shardwise.interop.frameworks import Configuration

DEFAULT_CLUSTER = "dgx-h100"
EMULATED_ON = "laptop"
# Fields of the strategy that no search varies, most of them since they change the numbers that training computes.
NOT_SEARCHED = ("collective", "recompute_operators", "bucket", "compression", "synchronise")
PLANNED_SEQ = 8192
PLANNED_BATCH = "4M-tokens"
# Fields that many configurations leave to the training script, so that they have to be assumed.
_ASSUMED = ("training.seq", "training.precision", "training.optimizer", "strategy.microbatch")

_DEGREES = tuple(f"strategy.{name}" for name in ("tp", "cp", "dp", "pp", "ep"))

Noun = TypeVar("Noun", bound=Spec)


def job_from(arguments: JobArguments, *, trains: bool = False, runs_here: bool = False) -> tuple[Job, list[str]]:
    """The job that a file and flags describe; flags override the file.

    The file may be another framework's configuration: notes say what is not used of it and what had to be assumed. It
    is priced as that framework runs it, unless our engine examines it (``runs_here``) or ``trains`` it.
    """
    fields, framework, notes = _job_fields(arguments, runs_here=runs_here or trains)
    _limit_sequence(fields)
    given = fields.get("run", {} if trains else None)
    if isinstance(given, Mapping):
        fields["run"] = with_steps(given, fields)
        if framework is not None:
            fields["run"], cut = fitting_run(fields["run"])
            notes += cut
    job = Job.from_dict(fields)
    if trains or not runs_here:  # not for verbs that examine or compare the job here instead of running it
        notes += precision_notes(job, given=names_precision(fields))
    return job, [*notes, *(_assumptions(fields, job) if framework is not None else [])]


def decided_job(arguments: JobArguments, *, trains: bool = False, runs_here: bool = False) -> tuple[Job, list[str]]:
    """As `job_from`, with what the job leaves open chosen."""
    job, notes = job_from(arguments, trains=trains, runs_here=runs_here)
    return decided(job), notes


def planning_job(
    arguments: JobArguments, framework: str | None = None, *, batch_from: int | None = None
) -> tuple[Job, list[str]]:
    """The job whose strategy is to be found, and what was assumed about it.

    Its strategy has only what no search varies (`NOT_SEARCHED`, and the overlap of tp). A ``framework`` sets the stack
    and the precision unless these are given. With ``batch_from`` the search chooses a batch of at least that size.
    """
    fields, imported, notes = _job_fields(arguments, runs_here=True)
    if framework is not None:
        notes += _take_framework_defaults(fields, framework)
    given = _part(fields, "strategy")
    Strategy.from_dict(without_auto({"strategy": given})["strategy"], "strategy")  # checks unused fields too
    notes += _not_taken(arguments.overrides)
    fields["strategy"] = {name: given[name] for name in NOT_SEARCHED if name in given}
    if "tp" in _mapping(given.get("overlap")):  # given by the caller, so that the stack does not decide
        fields["strategy"]["overlap"] = {"tp": given["overlap"]["tp"]}
    training = _part(fields, "training")
    batch = training.pop("global_batch", None)
    model: Model = fields["model"]
    if "seq" not in training:
        training["seq"] = min(model.max_seq or PLANNED_SEQ, PLANNED_SEQ)
        notes.append(f"no sequence length given: {training['seq']:,} tokens (--seq)")
    if batch is None and batch_from is None:
        batch = PLANNED_BATCH
        notes.append(f"no global batch given: {batch} (--global-batch)")
    fields["training"] = training
    if imported is not None and isinstance(fields.get("run"), Mapping):
        steps = _planned_steps(training, batch)
        fields["run"], cut = fitting_run({**fields["run"], **({"steps": steps} if steps else {})})
        notes += cut
    job = Job.from_dict(fields)
    check_algorithm(job.strategy.collective, "strategy.collective")
    notes += precision_notes(job, given=names_precision(fields))
    notes += filter(None, [sequence_note(job.model, job.training)])
    try:
        return job.unchecked(training=replace(job.training, global_batch=batch)), notes
    except SpecError as error:
        raise error.under("training") from None


def _not_taken(overrides: Mapping[str, Any]) -> list[str]:
    """Notes on fields of the strategy that a plan ignores because the stack decides."""
    ignored = ("strategy.overlap", "strategy.dispatch")
    paths = (path for path in overrides if path.startswith(ignored) and path != "strategy.overlap.tp")
    return [f"{path} is ignored: a plan overlaps and dispatches as its stack does (--stack)" for path in paths]


def _planned_steps(training: Mapping[str, Any], batch: Any) -> int | None:
    """The steps that the tokens of a run take; None if it has none, or if the batch is not a known number."""
    tokens = training.get("tokens")
    return -(-tokens // (batch * training["seq"])) if isinstance(tokens, int) and isinstance(batch, int) else None


def _take_framework_defaults(fields: dict[str, Any], framework: str) -> list[str]:
    """Sets the framework's stack and precision in ``fields`` unless given; returns notes.

    Raises SpecError if another framework's stack is given.
    """
    from shardwise.interop.frameworks import TARGETS, own_stack

    target, notes = TARGETS[framework], []
    if "stack" in fields:
        stack = stack_from(fields["stack"])
        if own_stack(stack, target).name != stack.name:
            remedy = f"leave ⟨stack⟩ out, or use {' or '.join(target.stacks)}"
            raise SpecError("⟨stack⟩", f"{stack.name} is not the software of {framework}", remedy)
    else:
        fields["stack"] = target.stacks[0]
    if not _mapping(fields.get("training")).get("precision"):
        set_field(fields, "training.precision", target.recipe)
        notes.append(
            f"for {framework}: {target.recipe} (--precision), priced with the stack {fields['stack']} (--stack)"
        )
    return notes


def source_of(arguments: JobArguments) -> Mapping[str, Any] | Configuration:
    """What lies below the overrides: the fields of a job, or another framework's configuration."""
    if not arguments.file:
        return arguments.source
    configuration = other_framework(arguments.file)
    if configuration is not None:
        return configuration
    fields = read_job_fields(arguments.file)
    require_job(fields, arguments.file)
    return fields


def _job_fields(arguments: JobArguments, *, runs_here: bool = False) -> tuple[dict[str, Any], str | None, list[str]]:
    """The fields of a job, the framework whose configuration they come from, and notes about that.

    Emulated nodes stand in for a cluster that is not given. A job that ``runs_here`` has our engine's stack.
    """
    numbers, overrides = arguments.bare, arguments.overrides
    named = {kind: overrides[kind] for kind in ("model", "cluster") if kind in overrides}
    check_bare_numbers(numbers, named)
    source = source_of(arguments)
    if isinstance(source, Mapping):
        fields, framework, notes = dict(source), None, list[str]()
    else:
        framework = source.framework
        numbers, sized = _sized(numbers, source, named)
        fields, notes = _imported(source, numbers, named, overrides)
        notes += sized
        if runs_here:
            fields.pop("stack", None)
    whole_overlap = "overlap" in _mapping(fields.get("strategy")) or "strategy.overlap" in overrides
    for path, value in overrides.items():
        if not path.startswith(("model.", "cluster.", "stack.")):
            set_field(fields, path, value)
    notes += _version_notes(fields.get("stack"))
    _change_stack(fields, overrides)
    nodes = emulation_from(_mapping(fields.get("run")).get("emulate"), "run.emulate")
    if nodes is not None and fields.get("cluster") is None and not numbers.given("cluster"):
        fields["cluster"] = cluster_of(nodes, cluster_from(EMULATED_ON))
    model = fields.get("model")
    fields["model"] = _looked_up("model", _model, numbers, fields, overrides)
    cluster = _looked_up("cluster", _cluster, numbers, fields, overrides)
    if nodes is not None and cluster.levels[-1].name == EMULATED:
        cluster = cluster_of(nodes, cluster)  # calibrated on virtual nodes, perhaps with another link
    fields["cluster"] = cluster
    if numbers.given("cluster") and "strategy.collective" not in overrides:
        # A bare topology implies its textbook algorithm.
        set_field(fields, "strategy.collective", "textbook")
    _take_stack_defaults(fields, whole_overlap=whole_overlap)
    notes += bare_model_notes(numbers, fields["model"])
    counted = fields["model"].counted
    return fields, framework, [*notes, *model_notes(model), *(counted.notes if counted else ())]


def _looked_up(
    kind: StandIn,
    look_up: Callable[[BareNumbers, dict[str, Any]], Noun],
    numbers: BareNumbers,
    fields: dict[str, Any],
    overrides: Mapping[str, Any],
) -> Noun:
    """The model or the cluster, with the fields that ``overrides`` change: in its mapping, or else once it is found."""
    changes = {path: value for path, value in overrides.items() if path.startswith(f"{kind}.")}
    if isinstance(fields.get(kind), Mapping | None) and not numbers.given(kind):
        for path, value in changes.items():
            set_field(fields, path, value)
        return look_up(numbers, fields)
    return changed(look_up(numbers, fields), kind, changes)


def _imported(
    configuration: Configuration, numbers: BareNumbers, named: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The fields of a job from another framework's configuration, and notes for the user.

    ``named`` are the overrides that are a whole model or cluster.
    """
    notes, framework = [], configuration.framework
    known = dict(named)
    if not numbers.given("cluster") and "cluster" not in known:
        known["cluster"] = DEFAULT_CLUSTER
        notes.append(f"no cluster is given: {numbers.gpus} devices of a {DEFAULT_CLUSTER} are assumed")
    machine = _cluster(numbers, known)
    shape = None
    if numbers.given("model") or "model" in known:
        shape = _model(numbers, {**known, "strategy": {"tp": overrides.get("strategy.tp", 1)}})
    given = {path: whole_number(str(overrides[path]), path) for path in _DEGREES if path in overrides}
    # The first reading only finds the degrees; together with those of flags they give the data-parallel degree.
    degrees = {**configuration.read(shape, given=given).fields, **given}
    others = math.prod(int(degrees.get(f"strategy.{name}") or 1) for name in ("tp", "cp", "pp"))
    if degrees.get("strategy.dp") is None and machine.devices % others == 0:
        given["strategy.dp"] = machine.devices // others
    read = configuration.read(shape, machine, given)
    fields = {**read.nested(), **known}
    if read.no_model and "model" not in fields and shape is None:
        raise read.without_model()
    if isinstance(fields.get("model"), dict):
        fields["model"] = {"name": f"from-{framework}", **fields["model"]}
    return fields, [f"{configuration.file}: {read.kind}", *notes, *read.notes, *read.not_priced]


def _sized(
    numbers: BareNumbers, configuration: Configuration, named: Mapping[str, Any]
) -> tuple[BareNumbers, list[str]]:
    """The numbers with as many devices as the configuration, or the script that starts it, says, unless given."""
    launch, cluster = configuration.launch, named.get("cluster")
    whole = numbers.given("cluster") or not (cluster is None or (isinstance(cluster, str) and ":" not in cluster))
    started = launch is not None and launch.devices is not None
    if numbers.gpus is not None or whole or (cluster is not None and not started):
        return numbers, []
    devices = (
        launch.devices if launch is not None and started else configuration.read(_given_model(numbers, named)).devices
    )
    if devices is None:
        remedy = f"give ⟨gpus=64⟩ for a {DEFAULT_CLUSTER}, or ⟨cluster=dgx-h100:8⟩ (`shardwise list clusters`)"
        why = f" ({launch.unknown})" if launch is not None and launch.unknown else ""
        raise SpecError("cluster", f"is not in a {configuration.framework} configuration{why}", remedy)
    numbers = replace(numbers, gpus=devices)
    if launch is None or not started:
        return numbers, []
    held = launch.node_devices
    machine = cluster_from(cluster or DEFAULT_CLUSTER)
    if numbers.gpus_per_node is None and held is not None and held < machine.node_devices and devices > held:
        numbers = replace(numbers, gpus_per_node=held)
    return numbers, [f"the script starts {launch.size_words}"]


def _given_model(numbers: BareNumbers, named: Mapping[str, Any]) -> Model | None:
    return _model(numbers, named) if numbers.given("model") or "model" in named else None


def _model(numbers: BareNumbers, fields: Mapping[str, Any]) -> Model:
    """The model that bare numbers describe, or that the fields of a job name or spell out."""
    if numbers.given("model"):
        strategy = fields.get("strategy")
        return bare_model(numbers, strategy.get("tp", 1) if isinstance(strategy, Mapping) else 1)
    if fields.get("model") is None:
        raise SpecError("model", "is missing", "name one: ⟨model=llama3-8b⟩ (`shardwise list models`), or ⟨params=...⟩")
    return priced_model_from(fields["model"])


def _cluster(numbers: BareNumbers, fields: Mapping[str, Any]) -> Cluster:
    """The cluster in the same way, cut to the devices that are asked for."""
    if numbers.given("cluster"):
        return bare_cluster(numbers)
    if fields.get("cluster") is None:
        remedy = "name one: ⟨cluster=dgx-h100:4⟩ (`shardwise list clusters`), or ⟨topology=...⟩ ⟨gpus=N⟩"
        raise SpecError("cluster", "is missing", remedy)
    try:
        cluster = job_cluster_from(fields["cluster"])
    except SpecError as error:
        raise error.under("cluster" if not error.field.startswith("cluster") else "") from None
    if mixed_kinds(cluster) is not None:
        for flag, value in (("⟨gpus⟩", numbers.gpus), ("⟨gpus_per_node⟩", numbers.gpus_per_node)):
            if value is not None:
                raise SpecError(flag, f"{value}, but the cluster has several kinds of nodes", "give each its size")
    if numbers.gpus_per_node is not None:
        cluster = cluster.with_node_devices(whole_number(numbers.gpus_per_node, "⟨gpus_per_node⟩"))
    if numbers.gpus is not None:
        cluster = cluster.with_devices(whole_number(numbers.gpus, "⟨gpus⟩"))
    return cluster


def _limit_sequence(fields: dict[str, Any]) -> None:
    """Keeps the default sequence length within the model's learned positions."""
    model, training = fields["model"], fields.get("training") or {}
    if isinstance(training, Mapping) and "seq" not in training and model.positions == "learned":
        set_field(fields, "training.seq", min(Training.seq, model.max_seq))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _version_notes(stack: Any) -> list[str]:
    """Which version of a stack is meant by its plain name, or by a name of before it had versions."""
    if isinstance(stack, str) and stack.lower() in presets.FORMER:
        return [f"stack {stack} is a version of another now: {presets.FORMER[stack.lower()]}"]
    versions = presets.versions("stack", stack) if isinstance(stack, str) else ()
    if not versions:
        return []
    newest, *older = (version.name for version in versions)
    return [f"stack {stack}: version {newest} is assumed, the newest known; write {stack}@{older[0]} for an older one"]


def _change_stack(fields: dict[str, Any], overrides: Mapping[str, Any]) -> None:
    """Changes the fields of the stack that ``overrides`` name (``stack.field``)."""
    changes: dict[str, Any] = {}
    for path, value in overrides.items():
        if path.startswith("stack."):
            set_field(changes, path.partition(".")[2], value)
    if not changes:
        return
    try:
        stack = stack_from(fields["stack"]) if "stack" in fields else default_stack()
        if isinstance(changes.get("overlap"), Mapping):
            changes["overlap"] = {**vars(stack.overlap), **changes["overlap"]}
        checked = Stack.from_dict(changes)
    except SpecError as error:
        raise error.under("stack") from None
    fields["stack"] = stack.stated(**{name: getattr(checked, name) for name in changes})


def _part(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The fields of one part of a job; empty if it is left out."""
    part = fields.get(name) or {}
    if not isinstance(part, Mapping):
        raise SpecError(name, f"{shown(part)} should be a mapping of fields", f"write its fields below {name}:")
    return dict(part)


def _take_stack_defaults(fields: dict[str, Any], *, whole_overlap: bool) -> None:
    """Sets overlap, dispatch and gradient accumulation of the strategy as the stack does them, unless given.

    A file, or a keyword, has the ``whole_overlap`` or none; flags change the stack's.
    """
    strategy = fields.get("strategy") or {}
    if not isinstance(strategy, Mapping):
        return
    try:
        stack = stack_from(fields["stack"]) if "stack" in fields else default_stack()
    except SpecError as error:
        raise error.under("stack") from None
    if "stack" in fields:
        device, training = fields["cluster"].device, _mapping(fields.get("training"))
        precision = str(training.get("precision") or device.usual_precision)
        running = stack.running(precision, device.name, moe=fields["model"].moe is not None)
        overlap = strategy.get("overlap", {})
        if not whole_overlap and isinstance(overlap, Mapping):
            # With tp a mapping, as given: a plan takes that one from the caller (`planning_job`).
            merged = {**vars(running.overlap), **overlap}
            set_field(fields, "strategy.overlap", merged if "tp" in overlap else Overlap.from_dict(merged, "overlap"))
        if "dispatch" not in strategy:
            set_field(fields, "strategy.dispatch", running.dispatch)
    zero, pp = (_whole_or_one(strategy.get(name)) for name in ("zero", "pp"))
    offload = strategy.get("offload")
    leave = offload == AUTO or bool(_mapping(offload).get("gradients"))
    usual = stack.usual_accumulation(zero, pp, leave=leave)
    if "accumulate" not in strategy and usual != Strategy.accumulate:
        set_field(fields, "strategy.accumulate", usual)


def _whole_or_one(value: object) -> int:
    """A degree that may still be text, or nonsense, which the job refuses."""
    if isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 10 else 1
    return value if isinstance(value, int) and not isinstance(value, bool) else 1


def _assumptions(fields: Mapping[str, Any], job: Job) -> list[str]:
    """Notes on fields that neither the configuration nor a flag sets."""
    nouns = {"strategy": job.strategy, "training": job.training}
    paths = [path.split(".") for path in _ASSUMED]
    return [
        f"{noun}.{name} is not in the file: {getattr(nouns[noun], name)} is assumed"
        for noun, name in paths
        if name not in (fields.get(noun) or {})
    ]


_DESCRIBING = ("source", "published_parameters")  # no longer true once a field is changed


def set_field(fields: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    place = fields
    for name in parents:
        inner = place.get(name)
        if inner is not None and not isinstance(inner, Mapping):
            raise SpecError(path, f"{name} is {shown(inner)}, which has no fields", "give a mapping in the file")
        place[name] = dict(inner or {})
        place = place[name]
    place[last] = value


def changed(noun: Noun, kind: str, overrides: Mapping[str, Any]) -> Noun:
    """A model or cluster with the fields changed that ``overrides`` name (``kind.field``)."""
    changes = {path.partition(".")[2]: value for path, value in overrides.items() if path.startswith(f"{kind}.")}
    if not changes:
        return noun
    fields = {name: value for name, value in noun.to_dict().items() if name not in _DESCRIBING}
    if isinstance(noun, Model):
        _leave_derived(noun, fields, changes)
    if fields.get("name"):
        fields["name"] = f"{fields['name']}-changed"
    try:
        for path, value in changes.items():
            set_field(fields, path, value)
        return type(noun).from_dict(fields)
    except SpecError as error:
        raise error.under(kind) from None


def _leave_derived(model: Model, fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Drops sizes that are derived from others, so that they are derived again."""
    if {"hidden", "heads"} & set(changes) and model.head_dim == model.hidden // model.heads:
        fields.pop("head_dim", None)
    if "heads" in changes and model.kv_heads == model.heads:
        fields.pop("kv_heads", None)


def with_steps(run: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run with the steps that ``training.tokens`` takes; raises SpecError if other steps are given."""
    training = fields.get("training")
    if not isinstance(training, Mapping) or training.get("tokens") is None:
        return dict(run)
    job = Job.from_dict({name: value for name, value in fields.items() if name != "run"})
    tokens = job.training.tokens
    assert tokens is not None
    needed = -(-tokens // job.tokens_per_step)
    if "steps" in run and (steps := _steps(run["steps"])) != needed:
        problem = f"{steps:,} of {job.tokens_per_step:,} tokens are not the {tokens:,} of training.tokens"
        raise SpecError("run.steps", problem, f"leave one of them out, or use {needed}")
    return {**run, "steps": needed}


def _steps(value: Any) -> int:
    try:
        return Run(steps=value).steps
    except SpecError as error:
        raise error.under("run") from None
