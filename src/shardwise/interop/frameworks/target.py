"""What the targets share: a table from our fields to their options, written, read and compared.

What is lost is found by reading back what was written: a field that does not return is reported, so none can be
dropped silently. A target's file has its table, what does not fit in one, and the reasons for losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from shardwise.interop.frameworks.documents import OUTSIDE, Format, Names, Settings, recorded
from shardwise.interop.frameworks.job_fields import (
    Exported,
    Imported,
    Lost,
    comparable,
    default_of,
    effective_fields,
    effects_of,
    plain,
    shape_of,
    value_at,
)
from shardwise.interop.shell import Unset
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.files import MOST_IN_CONFIGURATION
from shardwise.spec.hardware import Cluster
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.stack import stack_from

Table = Mapping[str, tuple[str, Any]]  # our fields of one noun -> the key of each, and what its absence means
Meanings = Mapping[str, Any] | Sequence[str]  # of words; of a sequence each word is its own meaning


def wrong_type(key: str, value: object, wanted: str) -> SpecError:
    return SpecError(key, f"{shown(value)} is not {wanted}", "correct that value of the configuration")


def written(noun: Any, table: Table) -> Settings:
    """The fields of ``noun`` under the keys of a table."""
    return {key: getattr(noun, name) for name, (key, _) in table.items()}


def word_for(meanings: Meanings, value: Any) -> str | None:
    """The first word that means ``value``."""
    return next((word for word, meaning in _as_mapping(meanings).items() if meaning == value), None)


def _as_mapping(meanings: Meanings) -> Mapping[str, Any]:
    return meanings if isinstance(meanings, Mapping) else {word: word for word in meanings}


# -- the table from our fields to their options ------------------------------------------------------

_UNSET: Any = object()
# Fields that must be set somewhere, whatever their value.
_ESSENTIAL = (
    "training.seq", "training.global_batch", "training.precision", "training.optimizer",
    "training.optimization.learning_rate", "strategy.microbatch",
)  # fmt: skip
_COUNTED = ("run.schedule.decay",)  # compared as a number of steps, given as a share
# What the user's training script decides, of frameworks whose configuration leaves it to that.
SCRIPT = {
    "training.seq": "the training script cuts the sequences",
    "training.dropout": "the model's code",
    "training.tokens": "the training script counts them",
}
SCRIPT_AND_OPTIMIZER = {
    **SCRIPT,
    "training.global_batch": "the data loader of the training script",
    "training.optimizer": "the training script builds it",
    "training.optimization": "the training script builds the optimizer",
    "run": "the training script counts steps and builds the scheduler",
    "strategy.microbatch": "the data loader of the training script",
}
_EVERYWHERE = {
    "strategy.collective": "the communication library chooses its algorithm (NCCL_ALGO)",
    "strategy.bucket": "the framework chooses its bucket size",
    "strategy.compression": "gradients are sent uncompressed",
    "strategy.synchronise": "ranks synchronise every step",
    "training.checkpoint_interval": "counted in steps, by the training script",
    "run.schedule.reference_batch": "give the learning rate of the batch that is used",
}


class Reading:
    """Settings being read: typed access that names the key in its errors and records which keys were used.

    ``model``, ``cluster`` and ``given`` (fields by dotted path) come from the user, beside the configuration.
    """

    def __init__(
        self,
        settings: Settings,
        model: Model | None,
        cluster: Cluster | None,
        given: Mapping[str, Any],
        beside: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self.settings, self.model, self.cluster, self.given = settings, model, cluster, given
        self.beside = beside  # the text of another file that the configuration names, where that is there
        self.used: set[str] = set()
        self.notes: list[str] = []
        self.no_model = ""  # why the configuration names none that is known, if so
        self.devices: int | None = None  # as many as the configuration says itself

    def has(self, key: str) -> bool:
        """Whether ``key`` has a value; the "auto" of the Hugging Face trainer does not count, nor what is not known."""
        return self.settings.get(key) not in (None, "auto") and not self.is_unknown(key)

    def is_unknown(self, key: str) -> bool:
        """Whether the value comes from outside of a script."""
        value = self.settings.get(key)
        return any(isinstance(part, Unset) for part in (value if isinstance(value, list) else [value]))

    def section(self, name: str) -> bool:
        """Whether there is a section of this name, even an empty one."""
        return any(key == name or key.startswith(name + ".") for key in self.settings)

    def value(self, key: str, default: Any = None) -> Any:
        self.used.add(key)
        return self.settings[key] if self.has(key) else default

    def integer(self, key: str, default: Any = None) -> Any:
        """An integer, or the text of one: a command line has only text."""
        value = self.number(key, default)
        if value is default:
            return default
        if value != int(value):
            raise wrong_type(key, value, "a whole number")
        return int(value)

    def count(self, key: str, default: Any = None) -> Any:
        """An integer of at least 1."""
        value = self.integer(key, default)
        if value is not default and value < 1:
            raise SpecError(key, f"{value} is not positive", "use 1 or more")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        value = self.value(key, _UNSET)
        if value is _UNSET:
            return default
        try:
            if isinstance(value, bool) or not isinstance(value, (int, float, str)):
                raise ValueError
            number = float(value)
            if not abs(number) < 1e18:
                raise ValueError
        except ValueError:
            raise wrong_type(key, value, "a number") from None
        return int(value) if isinstance(value, int) or str(value).lstrip("+-").isdigit() else number

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.value(key, default)
        if not isinstance(value, bool):
            raise wrong_type(key, value, "true or false")
        return value

    def text(self, key: str, default: Any = None) -> Any:
        value = self.value(key, default)
        if value is not default and not isinstance(value, str):
            raise wrong_type(key, value, "text")
        return value

    def zero(self, key: str, most: int, default: Any = None) -> Any:
        """A ZeRO stage of a framework that has those up to ``most``."""
        stage = self.integer(key, default)
        if not 0 <= stage <= most:
            remedy = f"use {', '.join(map(str, range(most)))} or {most}"
            raise SpecError(key, f"{stage} is not a ZeRO stage of this framework", remedy)
        return stage

    def choice(self, key: str, meanings: Meanings, default: Any = None) -> Any:
        """What a word means, in any case, or the word itself where ``meanings`` only lists words."""
        word = self.text(key)
        if word is None:
            return default
        folded = {name.lower(): meaning for name, meaning in _as_mapping(meanings).items()}
        if word.lower() not in folded:
            raise SpecError(key, f"{shown(word)} is not understood", "use one of " + ", ".join(meanings))
        return folded[word.lower()]

    def table(self, table: Table) -> dict[str, Any]:
        """The fields of a table, each read by the type of its default: a switch, text, a number, or a count."""

        def reader(usual: Any) -> Callable[[str, Any], Any]:
            if isinstance(usual, bool):
                return self.flag
            if isinstance(usual, (str, float)):
                return self.text if isinstance(usual, str) else self.number
            return self.integer if usual == 0 else self.count

        return {name: reader(usual)(key, usual) for name, (key, usual) in table.items()}

    def data_ranks(self, fields: Mapping[str, Any]) -> int | None:
        """Data-parallel ranks: as given, or from the devices and the other degrees; None if neither is known."""
        given = self.given.get("strategy.dp")
        if given is not None:
            return int(given)
        if self.cluster is None:
            return None
        return max(1, self.cluster.devices // product_of(fields, "tp", "cp", "pp"))


def product_of(fields: Mapping[str, Any], *names: str) -> int:
    """The devices that some degrees take together."""
    return math.prod(int(fields.get(f"strategy.{name}") or 1) for name in names)


@dataclass(frozen=True)
class Option:
    """A line of a table: our field, their key, and how values translate. A field is written if it has an effect in the
    job."""

    field: str  # our field, by dotted path
    key: str  # their setting
    meanings: Meanings | None = None
    """Our values by their words. None: a value passes unchanged, and a switch is written only when it is on."""
    absent: Any = _UNSET  # our value if the key is absent
    omit: Any = None  # value that is not written
    always: bool = False  # write it even if it has no effect
    when: Callable[[Job], bool] = lambda job: True  # write it only for such jobs
    read: Callable[[Reading, str], Any] | None = None  # how the value is read, where its type does not say

    def write(self, job: Job) -> Settings:
        value = value_at(job, self.field)
        if self.field != "strategy.zero":  # written as it is, even where one rank shards nothing
            value = comparable(self.field, value, job)
        if self.meanings is not None:
            value = word_for(self.meanings, value)
        omitted = value in (None, self.omit) or (value is False and self.absent is False)
        return {} if omitted or not self.when(job) else {self.key: plain(value)}

    def fields(self, reading: Reading) -> dict[str, Any]:
        if not reading.has(self.key):
            return {} if self.absent is _UNSET else {self.field: self.absent}
        if self.meanings is not None:
            return {self.field: reading.choice(self.key, self.meanings)}
        return {self.field: (self.read or _reader(self.field))(reading, self.key)}


def _reader(path: str) -> Callable[[Reading, str], Any]:
    default = default_of(path)
    if isinstance(default, bool):
        return Reading.flag
    if isinstance(default, str):
        return Reading.text
    return Reading.integer if path == "strategy.zero" else Reading.count


Why = str | Callable[[Job], str]
_MOST_EDITED = 4  # keys of one change
_FACTORS = tuple(Fraction(factor) for factor in ("2", "4", "8", "1/2", "1/4", "1/8"))  # of a microbatch


@dataclass(frozen=True)
class Move:
    """Settings that advice may change together; None removes one."""

    settings: Settings
    when: Callable[[Job], bool] = lambda job: True


@dataclass(frozen=True)
class Target:
    """A framework: its format, its table, what does not fit in a table, and what it cannot do."""

    name: str  # name on the command line
    title: str  # name in full
    format: Format  # how its files are read and written
    signature: tuple[str, ...]  # settings that only its files have
    programs: tuple[str, ...] = field(default=(), kw_only=True)  # commands, or modules of Python, that start it
    defaults_in: tuple[str, ...] = field(default=(), kw_only=True)
    """Names of files of its own that hold its defaults: a script may name one, and say the rest by itself."""
    options: tuple[Option, ...]  # the table
    interpret: Callable[[Reading, dict[str, Any]], None]  # fields that depend on several settings
    compose: Callable[[Job], Settings] | None = None
    """Settings that depend on several fields; None: jobs are read, not written."""
    reasons: Mapping[str, Why] = field(default_factory=dict)  # why a field is lost
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # where a field is set instead of in the configuration
    refusals: tuple[tuple[str, Callable[[Job], bool], str], ...] = ()
    """Combinations that the framework rejects: field, when, why."""
    notes: Callable[[Job], list[str]] = lambda job: []  # what to tell the user of an exported job
    carries_model: bool = False  # the configuration includes the model's dimensions
    filename: str = ""  # file that an export writes, if not the framework's name
    stacks: tuple[str, ...] = ()  # presets that describe its software, the usual one first
    recipe: str = "bf16"  # its default precision
    selective: Callable[[Job], tuple[str, ...]] = lambda job: ()
    """Operators that its selective recomputation recomputes, as far as they are priced here."""
    own_way: tuple[str, ...] = ("strategy.overlap",)
    """Fields that it decides itself: it still runs the layout, and is priced as it does."""
    unknown_keys: Literal["refused", "noted"] = "refused"
    """`noted` where plugins bring keys of their own."""
    learning: tuple[str, ...] = ()
    """Prefixes of settings that affect what is learned and for how long, but not what a step costs."""
    moves: tuple[Move, ...] = ()  # of those that are not written
    microbatch_key: str = ""
    accumulation_key: str = ""  # none where the whole batch is given
    other_dialect: tuple[str, ...] = ()  # settings of files that have other names for what moves

    @property
    def names(self) -> Names:
        return recorded(self.name)

    @property
    def software(self) -> tuple[str, ...]:
        """The presets of its stacks, in any version."""
        return tuple(stack.partition("@")[0] for stack in self.stacks)

    def settings(self, job: Job) -> Settings:
        """The job as the target's settings."""
        settings: Settings = {}
        effects = effects_of(job)
        for option in self.options:
            if option.always or effects.get(option.field, True):
                settings.update(option.write(job))
        assert self.compose is not None  # of those that are written
        settings.update({key: value for key, value in self.compose(job).items() if value is not None})
        return settings

    def export(self, job: Job) -> Exported:
        """The job in the target's format, with all that is lost."""
        text = self.text(job)
        refused = [Lost(path, value_at(job, path), why) for path, applies, why in self.refusals if applies(job)]
        lost: dict[str, Lost] = {}
        for loss in (*refused, *_in_sections(self._not_returned(job, self.read_back(job, text)), job)):
            lost.setdefault(loss.field, loss)
        files = {self.filename or self.name + self.format.suffixes[0]: text}
        return Exported(self.name, self.names.version, files, tuple(lost.values()), tuple(self.notes(job)))

    def edits(self, own: Settings, job: Job, neighbours: Iterable[Job]) -> Iterator[Settings]:
        """Changes of ``own``, the settings of a file, that advice may try: its table's moves, or what the
        ``neighbours`` of its job have otherwise."""
        if any(key in own for key in self.other_dialect):
            return
        yield from (move.settings for move in self.moves if move.when(job))
        size = Fraction(str(own.get(self.microbatch_key, job.strategy.microbatch)))
        times = Fraction(str(own.get(self.accumulation_key, job.microbatches)))
        for factor in _FACTORS if self.microbatch_key else ():
            accumulated = {self.accumulation_key: times / factor} if self.accumulation_key else {}
            counts = {self.microbatch_key: size * factor, **accumulated}
            if all(count.denominator == 1 for count in counts.values()):
                yield {key: int(count) for key, count in counts.items()}
        before = self.settings(job) if self.compose is not None else {}
        for other in neighbours if self.compose is not None else ():
            after = self.settings(other)
            keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
            if len(keys) <= _MOST_EDITED and not any(refuses(other) for _, refuses, _ in self.refusals):
                yield {key: after.get(key) for key in keys}

    def text(self, job: Job) -> str:
        """The job in the target's format."""
        return self.format.render(self.settings(job), self.names)

    def read_back(self, job: Job, text: str, cluster: Cluster | None = None) -> Imported:
        """What the configuration of a job says when it is read."""
        given = {"strategy.pp": job.strategy.pp, "strategy.dp": job.strategy.data_parallel}
        return self.read(text, job.model, cluster, given)

    def read(
        self,
        text: str,
        model: Model | None = None,
        cluster: Cluster | None = None,
        given: Mapping[str, Any] | None = None,
        beside: Callable[[str], str | None] = lambda name: None,
    ) -> Imported:
        """What a configuration says; raises SpecError if it is malformed, unknown, contradictory or empty.

        ``given`` are fields of the job that are known beside the file (``{"strategy.pp": 4}``), for formats that leave
        them to the training script. ``beside`` reads the files that it names.
        """
        if len(text) > MOST_IN_CONFIGURATION:
            raise SpecError(self.name, f"{len(text):,} characters are too many", "is it a configuration?")
        settings = self.format.parse(text, f"{self.title} configuration", self.names)
        outside = settings.pop(OUTSIDE, [])
        if not settings:
            raise SpecError(self.name, f"has no settings of {self.title}: nothing was read", "is it the right file?")
        strangers = [key for key in settings if self.unknown_keys == "noted" and key not in self.names]
        for key, value in settings.items():
            if key not in strangers:
                self.names.check(key, value)
        reading = Reading(settings, model, cluster, given or {}, beside)
        reading.notes += [f"{word} is not set in the script: options in it are not priced" for word in outside]
        fields: dict[str, Any] = {}
        for option in self.options:
            fields.update(option.fields(reading))
            reading.used.add(option.key)
        self.interpret(reading, fields)
        self._check_unknown(reading)
        fields = _with_stack(fields, self.stacks[0])
        left = [key for key, value in settings.items() if key not in reading.used
                and not self.names.ignores(key) and not self.names.is_default(key, value)]  # fmt: skip
        reading.notes += [
            f"{key} is not a setting of {self.names.version}: left out" for key in left if key in strangers
        ]
        unused = [key for key in left if key not in strangers]
        shown_unused = tuple(f"{key} = {shown(settings[key])}" for key in unused)
        all_given = fields.get("strategy.dp") is not None  # so that none is left to the cluster
        devices = reading.devices or (product_of(fields, "tp", "cp", "pp", "dp") if all_given else None)
        notes, marks = tuple(reading.notes), tuple(key for key in self.signature if key in settings)
        return Imported(self.name, fields, shown_unused, notes, reading.no_model, devices, self.title, marks)

    def _check_unknown(self, reading: Reading) -> None:
        """What a script gets from outside is left out if no step costs more for it, or the user has said it beside."""
        said = {option.key for option in self.options if option.field in reading.given}
        for key in reading.used - said:
            if not reading.is_unknown(key):
                continue
            value = plain(reading.settings[key])
            written = str(value).startswith("<")
            whence = "is a placeholder" if written else "is set outside the script"
            if not key.startswith(self.learning):
                remedy = "write a value instead of it" if written else "set the variable in it, as in BATCH=256"
                raise SpecError(key, f"{shown(value)} {whence}", remedy)
            reading.notes.append(f"{key} = {shown(value)} {whence}: left out")

    def _not_returned(self, job: Job, back: Imported) -> list[Lost]:
        elsewhere = {**_EVERYWHERE, **self.elsewhere}
        lost = []
        exported = {**effective_fields(job), **(shape_of(job.model) if self.carries_model else {})}
        returned = {**_model_defaults(back), **back.fields} if self.carries_model else back.fields
        for path, value in exported.items():
            where = _nearest(elsewhere, path)
            if where is not None and path not in back.fields and not _follows(path, back):
                if path in _ESSENTIAL or value != comparable(path, default_of(path), job):
                    lost.append(Lost(path, value_at(job, path) if path in _COUNTED else value, where, elsewhere=True))
            elif path == "strategy.dp" and path not in returned:
                continue  # the devices that the other degrees leave
            elif path == "training.tokens" and value is None:
                continue  # a job without a length is not contradicted by one
            elif path == "run.steps" and _follows(path, back):
                if -(-back.fields["training.tokens"] // job.tokens_per_step) != value:
                    lost.append(Lost(path, value, self._reason(path, job)))
            elif comparable(path, returned.get(path, default_of(path)), job) != value:
                shown_value = job.strategy.order if path == "strategy.order" else value
                lost.append(Lost(path, shown_value, self._reason(path, job)))
        return lost

    def _reason(self, path: str, job: Job) -> str:
        why = _nearest(self.reasons, path) or f"{self.title} has no option for it"
        return why if isinstance(why, str) else why(job)


def _with_stack(fields: Mapping[str, Any], usual: str) -> dict[str, Any]:
    """The fields with their stack: ``usual`` unless one is named, with what the settings change of it (``stack.loss``).

    A stack that is changed is written out, under a name that says so.
    """
    changes = {path.partition(".")[2]: value for path, value in fields.items() if path.startswith("stack.")}
    stack = stack_from(fields.get("stack", usual)).changed(**changes)
    kept = {path: value for path, value in fields.items() if path.partition(".")[0] != "stack"}
    return {**kept, "stack": presets.shorten(stack)}


def _in_sections(lost: list[Lost], job: Job) -> list[Lost]:
    """How rotary positions are stretched, lost as a whole, is one entry instead of one for each of its constants."""
    section = "model.numerics.rope_scaling"
    if not any(loss.field == f"{section}.kind" for loss in lost):
        return lost
    (why,) = (loss.why for loss in lost if loss.field == f"{section}.kind")
    others = [loss for loss in lost if not loss.within(section)]
    return [*others, Lost(section, value_at(job, section).to_dict(), why)]


def _nearest(table: Mapping[str, Any], path: str) -> Any:
    """The entry of a path, or of the section that it is in."""
    while path and path not in table:
        path = path.rpartition(".")[0]
    return table.get(path)


def _follows(path: str, back: Imported) -> bool:
    """Whether a field that did not return follows from one that did."""
    return path == "run.steps" and back.fields.get("training.tokens") is not None


def _model_defaults(back: Imported) -> dict[str, Any]:
    """The shape of the returned model, defaults filled in; nothing if the fields make no valid model."""
    tree = back.nested().get("model")
    if not isinstance(tree, dict):
        return {}
    try:
        return shape_of(Model.from_dict(tree))
    except SpecError:
        return {}
