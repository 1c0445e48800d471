"""What a launch script starts, and on how many devices: torchrun, Accelerate, DeepSpeed, MPI, Slurm."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.interop.shell import Unset, commands_of
from shardwise.interop.shell_words import Malformed
from shardwise.spec.errors import SpecError
from shardwise.spec.files import parse_yaml

Beside = Callable[[str], str | None]  # the text of a file by its name, where it is there
Options = Mapping[str, list[str]]  # by name, with underscores; the last of each counts

_LONGEST = 2**17  # characters; published scripts have a few thousand
_MOST_HOPS = 3  # from a script that starts a script
_SCRIPT = re.compile(
    r"(?:(?>\$\(.*\))|[^-\s=$])[^\s=]*\.py|\$[^\s=(]*\.py", re.DOTALL
)  # in a folder like $(pwd), perhaps
_CONFIGURATION = re.compile(r"[^\s=]+\.(?:ya?ml|json|toml)")
_NAMED = ("config", "config_file", "cfg", "job.config_file")
_PRINTING = ("echo", "printf", "cat", "cp", "rm", "mkdir", "sed", "pip")
_LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun")
_LAUNCHING_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun",
                      "accelerate.commands.launch": "accelerate"}  # fmt: skip


@dataclass(frozen=True)
class ScriptLaunch:
    """The command of a script that trains: what it runs, with what, and on how many devices."""

    program: str  # a script of Python, a module, or a command
    files: tuple[str, ...] = ()  # configurations that it is given
    settings: dict[str, Any] = field(default_factory=dict)  # by dotted path: ``--key value`` and ``key=value``
    outside: tuple[str, ...] = ()  # settings whose value is set outside the script
    nodes: int | None = None
    node_devices: int | None = None
    devices: int | None = None
    unknown: str = ""  # why that is not known, if it is not
    accelerate: str = ""  # the file that says how Accelerate shards

    @property
    def size_words(self) -> str:
        return f"{self.devices} processes" + (f" on {self.nodes} nodes" if (self.nodes or 1) > 1 else "")


def launch_of(text: str, programs: Collection[str] = (), beside: Beside = lambda name: None) -> ScriptLaunch | None:
    """What a script starts; None where it starts nothing, or cannot be read. ``programs`` train without a script."""
    return _launch(text, programs, beside, {}, 0)


def _launch(
    text: str, programs: Collection[str], beside: Beside, outer: Mapping[str, str], hops: int
) -> ScriptLaunch | None:
    if len(text) > _LONGEST:
        return None
    asked = {**_directives(text), **outer}
    try:
        commands, variables = commands_of(text, slurm_environment(asked))
    except Malformed:
        return None
    commands = [words for words in commands if words[0].rpartition("/")[2] not in _PRINTING]
    for words in commands:
        asked |= _slurm_options(words)
    for words in reversed(commands):
        at = _program_at(words, programs)
        if at is not None:
            return _read(words, at, asked, variables, beside)
    for words in reversed(commands) if hops < _MOST_HOPS else ():
        script = next((word for word in words if word.endswith(".sh")), None)
        inner = None if script is None or isinstance(script, Unset) else beside(script)
        if inner is not None and (found := _launch(inner, programs, beside, asked, hops + 1)) is not None:
            return found
    return None


def _program_at(words: Sequence[str], programs: Collection[str]) -> int | None:
    """Where the program stands that a command trains with: a script, a module, or a command of a framework."""
    for at, word in enumerate(words):
        following = words[at + 1] if at + 1 < len(words) else ""
        if _SCRIPT.fullmatch(word):
            # A script may start the one after it: `deepy.py train.py`.
            return at + 1 if _SCRIPT.fullmatch(following) else at
        if word in ("-m", "--module") and following and following not in _LAUNCHING_MODULES:
            return at + 1
        if word.rpartition("bin/")[2] in programs:
            return at
    return None


def _read(
    words: Sequence[str],
    at: int,
    asked: Mapping[str, str],
    variables: Mapping[str, list[str]],
    beside: Beside,
) -> ScriptLaunch:
    program = words[at]
    own = "." in program.rpartition("/")[2]
    # Commands of their own take the launcher's options between their own: `tune run --nproc_per_node 8`.
    size = _size(words[:at] if own else words, asked, variables, beside)
    plain, options = _arguments(words[at + 1 :])
    files = [word for name in _NAMED for word in options.get(name, ())]
    if "config_name" in options:  # Hydra's
        folder = "".join(f"{path}/" for path in options.get("config_path", ()))
        files += [f"{folder}{name.removesuffix('.yaml')}.yaml" for name in options["config_name"]]
    folder, *named = options.get("d") or [""]  # of GPT-NeoX: a folder and files in it
    files += [f"{folder}/{name}" for name in named]
    files += [word for word in plain if _CONFIGURATION.fullmatch(word)]
    taken = {*_NAMED, "config_name", "config_path", "d", *_SIZES}
    said = {name: values for name, values in options.items() if name not in taken}
    said |= {name: [value] for name, value in map(_assigned, plain) if name}
    outside = tuple(name for name, values in said.items() if any(isinstance(value, Unset) for value in values))
    settings = {name: _value(values) for name, values in said.items() if name not in outside}
    return ScriptLaunch(program, tuple(dict.fromkeys(filter(None, files))), settings, outside, **size)


def _arguments(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Words that stand alone, and options with their values; what follows a switch as ``key=value`` is none."""
    plain, options, option = list[str](), dict[str, list[str]](), ""
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            option, equals, value = word.lstrip("-").partition("=")
            option = option.replace("-", "_")
            options[option] = [Unset(value) if isinstance(word, Unset) else value] if equals else []
        elif option and not _assigned(word)[0]:
            options[option].append(word)
        else:
            plain.append(word)
            option = ""
    return plain, options


def _assigned(word: str) -> tuple[str, str]:
    """Key and value of ``key=value``, also as Hydra adds keys (``+key=value``); empty for other words."""
    found = re.fullmatch(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word, re.DOTALL)
    if found is None:
        return "", ""
    return found[1], Unset(found[2]) if isinstance(word, Unset) else found[2]


def _value(values: list[str]) -> Any:
    """A value as YAML reads it; an option without one is a switch."""
    if not values:
        return True
    read = [_scalar(value) for value in values]
    return read[0] if len(read) == 1 else read


def _scalar(text: str) -> Any:
    try:
        return parse_yaml(text) if text else text
    except SpecError:
        return text


# -- the size ------------------------------------------------------------------------------------------------------

# Options of launchers, by the names that they have with underscores.
_NODES = ("nnodes", "num_machines", "num_nodes")
_PER_NODE = ("nproc_per_node", "num_gpus", "npernode", "ppn", "ntasks_per_node")
_COUNTED = (*_NODES, *_PER_NODE, "num_processes", "hostfile", "include")
_SIZES = (*_COUNTED, "exclude", "master_addr", "master_port", "node_rank", "machine_rank", "rdzv_endpoint",
          "rdzv_backend", "rdzv_id", "launcher", "standalone", "local_rank")  # fmt: skip


def _size(
    words: Sequence[str], asked: Mapping[str, str], variables: Mapping[str, list[str]], beside: Beside
) -> dict[str, Any]:
    """Fields of a `ScriptLaunch`: the innermost launcher decides, then the environment, then Slurm."""
    launcher = next(iter(_launchers(words)), "")
    _, options = _arguments(words)
    size: dict[str, Any] = {"accelerate": (options.get("config_file") or [""])[0] if launcher == "accelerate" else ""}
    for name in _COUNTED:
        if any(isinstance(value, Unset) for value in options.get(name, ())):
            return {**size, "unknown": f"--{name} {options[name][0]} is set outside the script"}

    def number(*names: str) -> int | None:
        return _count(next((options[name][0] for name in names if options.get(name)), None))

    def variable(name: str) -> int | None:
        return _count((variables.get(name) or [""])[0])

    nodes, per_node, devices = number(*_NODES), number(*_PER_NODE), number("num_processes")
    held = _of_slurm(asked, launcher) or _visible(variables)
    if launcher == "torchrun":
        elastic = re.fullmatch(r"\d+:(\d+)", (options.get("nnodes") or [""])[0])
        nodes = int(elastic[1]) if elastic else nodes or 1
        per_node = per_node if options.get("nproc_per_node") else 1  # which may be `gpu`: as many as a node has
    elif launcher in ("mpirun", "mpiexec"):
        mapped = re.match(r"ppr:(\d+):node", (options.get("map_by") or [""])[0])
        devices, per_node = number("np", "n"), int(mapped[1]) if mapped else per_node or number("N")
    if launcher in ("deepspeed", "mpirun", "mpiexec") and devices is None and (slots := _slots(options, beside)):
        per_node = min(max(slots), per_node or max(slots))
        devices, nodes = sum(min(slot, per_node) for slot in slots), len(slots)
    nodes = nodes or variable("NNODES") or _count(asked.get("nodes"))
    if launcher == "srun" and "ntasks" in asked and per_node is None:
        devices = devices or _count(asked["ntasks"])
    per_node = per_node or variable("NPROC_PER_NODE") or (held if devices is None else None)
    if devices is None and per_node is not None:
        devices = (nodes or 1) * per_node
    if devices is None and (file := (options.get("hostfile") or [""])[0]):
        size["unknown"] = f"--hostfile {file} is not beside the script"
    if devices is not None and nodes and per_node is None and devices % nodes == 0:
        per_node = devices // nodes
    return {**size, "nodes": nodes, "node_devices": per_node, "devices": devices}


def _launchers(words: Sequence[str]) -> Iterator[str]:
    """The launchers of a command, the innermost first."""
    for word in reversed(words):
        name = word.rpartition("/")[2]
        if name in _LAUNCHERS:
            yield name
        elif name in _LAUNCHING_MODULES:
            yield _LAUNCHING_MODULES[name]


def _count(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[1-9]\d{0,6}", text) else None


def _visible(variables: Mapping[str, list[str]]) -> int | None:
    """As many as ``CUDA_VISIBLE_DEVICES`` names."""
    named = (variables.get("CUDA_VISIBLE_DEVICES") or [""])[0]
    return len(named.split(",")) if re.fullmatch(r"\d+(,\d+)*", named) else None


_LINE = re.compile(r"^\s*([\w.-]+)(?:[^#\n]*\bslots\s*=\s*(\d{1,4}))?[^\n]*$", re.MULTILINE)


def _slots(options: Options, beside: Beside) -> list[int]:
    """Devices of each host of a hostfile, or of ``--include host1@host2:0,1``, as DeepSpeed has it."""
    name = (options.get("hostfile") or [""])[0]
    text = beside(name) if name else None
    hosts = {host: int(slots or 1) for host, slots in _LINE.findall(text or "") if not host.startswith("#")}
    chosen: dict[str, int] = {}
    for part in (options.get("include") or [""])[0].split("@"):
        host, _, numbers = part.partition(":")
        if host and (numbers or host in hosts):
            chosen[host] = len(numbers.split(",")) if numbers else hosts[host]
    return list((chosen or hosts).values())


# -- Slurm -----------------------------------------------------------------------------------------------------------

_SHORT = {"N": "nodes", "n": "ntasks", "G": "gpus"}
_ASKED = ("nodes", "ntasks", "ntasks_per_node", "gpus_per_node", "gpus", "gres", "gpus_per_task")


def slurm_environment(asked: Mapping[str, str]) -> dict[str, str]:
    """The variables that Slurm sets for what a script asks of it."""
    nodes, tasks, devices = (_count(asked.get(name)) for name in ("nodes", "ntasks_per_node", "ntasks"))
    per_node = _of_slurm(asked, "")
    devices = devices or (tasks * (nodes or 1) if tasks else None)
    known = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes, "SLURM_NTASKS": devices, "SLURM_NPROCS": devices,
             "SLURM_NTASKS_PER_NODE": tasks, "SLURM_GPUS_ON_NODE": per_node,
             "SLURM_GPUS_PER_NODE": per_node}  # fmt: skip
    return {name: str(value) for name, value in known.items() if value is not None}


def environment_of(text: str) -> dict[str, str]:
    """What a script that Slurm runs finds in its environment."""
    return slurm_environment(_directives(text))


def _directives(text: str) -> dict[str, str]:
    lines = re.findall(r"^#SBATCH[ \t]+([^\n#]*)", text[:_LONGEST], re.MULTILINE)
    return _asked_of(" ".join(lines).split())


def _slurm_options(words: Sequence[str]) -> dict[str, str]:
    if words[0].rpartition("/")[2] not in ("srun", "sbatch", "salloc"):
        return {}
    end = next((at for at, word in enumerate(words) if at and re.search(r"\.(py|sh)$", word)), len(words))
    return _asked_of(words[1:end])


def _asked_of(words: Sequence[str]) -> dict[str, str]:
    asked: dict[str, str] = {}
    joined = [re.sub(r"^-([NnG])(?=[\d=])=?", r"-\1=", word) for word in words]  # -N4
    for name, values in _arguments(joined)[1].items():
        full = _SHORT.get(name, name)
        if full in _ASKED and values and not isinstance(values[0], Unset):
            asked[full] = re.sub(r"^(\d+)-\d+$", r"\1", values[0])
    return asked


def _of_slurm(asked: Mapping[str, str], launcher: str) -> int | None:
    """Devices of a node: one for each task where Slurm starts them itself."""
    tasks = _count(asked.get("ntasks_per_node"))
    gres = re.fullmatch(r"(?:\w+:)*?(\d{1,3})", asked.get("gpus_per_node", ""))
    gres = gres or re.search(r"gpu(?::\w*[A-Za-z]\w*)?:(\d{1,3})", asked.get("gres", ""))
    held = int(gres[1]) if gres else None
    if held is None and (whole := _count(asked.get("gpus"))) and (nodes := _count(asked.get("nodes"))):
        held = whole // nodes or None
    return tasks if launcher == "srun" and tasks and (tasks > 1 or held in (None, 1)) else held
