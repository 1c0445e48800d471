"""What the source may not do: each rule searches one module, which is read and parsed once for all of them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from shardwise.cli.completion import words_of
from shardwise.cli.main import VERBS
from shardwise.spec.errors import in_flags
from shardwise.spec.fields import job_fields
from shardwise.spec.schedules import schedule_records

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardwise"
MOST_LINES = 500


@dataclass(frozen=True)
class Module:
    """A module by its place in the package, such as ``cost/traffic/network.py``."""

    name: str
    text: str

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(ast.parse(self.text)))

    @property
    def package(self) -> str:
        """The package it is in; "" for the modules of the root, which only hand on."""
        return self.name.partition("/")[0] if "/" in self.name else ""

    @property
    def room(self) -> str:
        """The folder it is in, such as ``cost/traffic``."""
        return self.name.rpartition("/")[0]


@cache
def modules() -> tuple[Module, ...]:
    return tuple(
        Module(path.relative_to(SOURCE).as_posix(), path.read_text(encoding="utf-8"))
        for path in sorted(SOURCE.rglob("*.py"))
    )


# -- imports point downwards ---------------------------------------------------------------------------


@cache
def packages() -> dict[str, bool]:
    """The packages that `docs/architecture.md` lists, lowest first, and whether each may import torch."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Packages")[2].partition("\n## ")[0]
    return {name: torch == "yes" for name, torch in re.findall(r"^\| `(\w+)` \|.*\| (yes|no) \|$", table, re.MULTILINE)}


def imported(module: Module) -> Iterator[str]:
    """The dotted name of everything that any import statement names, wherever it stands."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ("shardwise", *module.name.split("/")[:-1])
                base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def in_circles(given: Iterable[Module]) -> list[str]:
    """Modules on circles of imports, wherever an import stands; those for type checkers alone do not count."""
    names = {_dotted(module): module for module in given}
    left = {name: {other for other in _run_time_imports(module, names) if other != name}
            for name, module in names.items()}  # fmt: skip
    while True:
        needed = set().union(*left.values())
        kept = {name: after & left.keys() for name, after in left.items() if name in needed and after & left.keys()}
        if kept == left:
            return sorted(left)
        left = kept


def _dotted(module: Module) -> str:
    return "shardwise." + module.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _run_time_imports(module: Module, names: Container[str]) -> Iterator[str]:
    guarded = [node for node in module.nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    for_types = {id(inner) for node in guarded for inner in ast.walk(node)}
    for node in module.nodes:
        if isinstance(node, ast.ImportFrom) and id(node) not in for_types:
            base = node.module or ""
            imported = (f"{base}.{alias.name}" for alias in node.names)
            yield from (name if name in names else base for name in imported if name in names or base in names)


def imports_from_above(module: Module) -> Iterator[str]:
    """Each package imports only itself and what stands before it; torch belongs to some."""
    order, package = list(packages()), module.package
    for name in sorted(set(imported(module))):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "torch" and not packages().get(package):
            yield f"{name} ({package or 'the root'} does without torch)"
        if top == "shardwise" and package and other in order and order.index(other) > order.index(package):
            yield f"{name} ({package} stands below {other})"


def knows_a_price(module: Module) -> Iterator[str]:
    """What runs a job does not ask what it costs: facts that are both priced and run are in `layout`."""
    if module.package in ("models", "engine"):
        yield from sorted(name for name in set(imported(module)) if name.startswith("shardwise.cost"))


# -- labels are fields -----------------------------------------------------------------------------------

DECIDE = ("cost", "layout", "pipeline", "planner", "measure", "report")
_PARSING = {"startswith", "endswith", "removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit"}
_FOR_PEOPLE = {"what", "words", "subject", "title"}
# Text that is not ours, or that a user typed: where it comes in.
FOREIGN_TEXT = {
    "accuracy": "published tables",
    "planner/constraints.py": "options of the command line",
    "planner/advice/what_if.py": "options of the command line",
    "measure/calibrate": "names of clusters and processors",
    "measure/doctor": "the operating system's answers",
    "measure/dryrun/world.py": "names of PyTorch's operators",
    "measure/plain.py": "names of parameters",
    "measure/reference.py": "names of parameters",
    "measure/verify.py": "/proc/meminfo",
    "report/tables.py": "text that is folded to a width",
    "report/page.py": "text that is cut into lines",
    "report/bench.py": "a figure without its zeros",
    "report/compare.py": "a figure and its unit",
}


def parsed_labels(module: Module) -> Iterator[str]:
    """Where a module takes text apart, or compares the words of a description."""
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, node.func.value
            library = isinstance(owner, ast.Name) and owner.id in ("np", "torch", "numpy")
            regular = isinstance(owner, ast.Name) and owner.id == "re"
            if regular or (method in _PARSING and not library):
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            described = any(isinstance(one, ast.Attribute) and one.attr in _FOR_PEOPLE for one in sides)
            if described and any(_has_text(one) for one in sides):
                yield f"line {node.lineno}: {ast.unparse(node)}"


def _has_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return any(map(_has_text, node.elts))
    named = isinstance(node, ast.Name) and node.id.isupper()
    return named or isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def labels_taken_apart(module: Module) -> Iterator[str]:
    """In the packages that decide, which read no text but that of others."""
    if module.package in DECIDE and not module.name.startswith(tuple(FOREIGN_TEXT)):
        yield from parsed_labels(module)


# -- rank arithmetic is in `layout` ----------------------------------------------------------------------

# These number ranks of their own: the steps of an algorithm, the order of actions, the placement a schedule is made of.
OWN_NUMBERS = ("layout/", "collectives/", "pipeline/builders/", "spec/schedules.py")


def is_rank(node: ast.AST) -> bool:
    """Whether an expression stands for the number of a rank, by its name."""
    while isinstance(node, ast.BinOp) and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
        node = node.left
    if isinstance(node, ast.Subscript):
        return ast.unparse(node.value).rpartition(".")[2] in ("members", "ranks")
    if not isinstance(node, (ast.Name, ast.Attribute, ast.Call)):
        return False
    owner, _, name = ast.unparse(node).removesuffix("()").rpartition(".")
    return (name.endswith("rank") and name != "per_rank") or (owner, name) == ("rank", "number")


def is_mirror(node: ast.BinOp) -> bool:
    """Whether a rank is counted from the other end: p - 1 - rank."""
    end = ast.unparse(node.left)
    return is_rank(node.right) and (end.endswith(" - 1") or end == "last")


def rank_arithmetic(module: Module) -> Iterator[str]:
    if module.name.startswith(OWN_NUMBERS):
        return
    for node in module.nodes:
        if isinstance(node, ast.BinOp):
            divided = isinstance(node.op, (ast.FloorDiv, ast.Mod)) and is_rank(node.left)
            if divided or (isinstance(node.op, ast.Sub) and is_mirror(node)):
                yield ast.unparse(node)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.op, (ast.FloorDiv, ast.Mod)) and is_rank(node.target):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name == "stride":  # of a dimension; a tensor's has no arguments
                yield ast.unparse(node)


# -- what a schedule is like is asked of its record -------------------------------------------------------

NAMES = {one.name for one in schedule_records()}
QUOTED = re.compile("[\"'](" + "|".join(map(re.escape, NAMES)) + ")[\"']")
# The table; what builds each; what other people call them.
SCHEDULE_DATA = ("spec/schedules.py", "pipeline/builders/", "interop/frameworks/", "accuracy/")


def _constants(*nodes: ast.AST) -> Iterator[str]:
    return (one.value for one in nodes if isinstance(one, ast.Constant) and isinstance(one.value, str))


def schedule_names_asked(module: Module) -> Iterator[str]:
    """Schedule names in comparisons, in patterns and as the beginnings or ends of a text; any at all but in data."""
    if not QUOTED.search(module.text):
        return
    for node in module.nodes:
        ends = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        ends = ends and node.func.attr in ("startswith", "endswith", "removeprefix", "removesuffix")
        if isinstance(node, ast.Compare | ast.MatchValue) or ends:
            yield from (f"line {node.lineno}: {name}" for name in _constants(*ast.walk(node)) if name in NAMES)
    if not module.name.startswith(SCHEDULE_DATA):
        yield from (name for name in _constants(*module.nodes) if name in NAMES)


# -- and the rest ----------------------------------------------------------------------------------------


def too_long(module: Module) -> Iterator[str]:
    """A module can be read in one sitting."""
    if (lines := len(module.text.splitlines())) > MOST_LINES:
        yield f"{lines} lines"


def says_nothing(module: Module) -> Iterator[str]:
    """Its first line says what it knows."""
    tree = module.nodes[0]
    assert isinstance(tree, ast.Module)
    if tree.body and not ast.get_docstring(tree):
        yield "has no docstring"


def private_torch(module: Module) -> Iterator[str]:
    """What torch names with a leading underscore, attributes included, comes through one module, each with a reason."""
    if module.name == "engine/torch_private.py":
        return
    if packages().get(module.package):
        yield from _private_attributes(module)
    names = set(imported(module))
    names |= {ast.unparse(node) for node in module.nodes if isinstance(node, ast.Attribute)}
    for name in sorted(one for one in names if re.fullmatch(r"[\w.]+", one)):
        top, *rest = name.split(".")
        if top in ("torch", "dist", "distributed_c10d") and any(re.fullmatch(r"_[A-Za-z]\w*", one) for one in rest):
            yield name


def _private_attributes(module: Module) -> Iterator[str]:
    """Attributes of other objects than ``self`` with a leading underscore that the module does not define itself."""
    own = {"_exit", "_replace", "_attn_implementation"}  # of os, of named tuples, and of transformers' configs
    own |= {"_flash_attn_fwd", "_flash_attn_bwd"}  # FlashAttention-4's passes, which have no other names
    others = []
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            own.add(node.attr)
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"_[A-Za-z]\w*", node.attr):
            others.append(node)
    yield from (f"{ast.unparse(node)} (line {node.lineno})" for node in others if node.attr not in own)


def arguments_dynamo_miscounts(module: Module) -> Iterator[str]:
    """`forward` of an autograd function with further parameters before ``*``: compiled without gradients, it loses its
    ``ctx`` where two arguments are left for the ``*`` (torch 2.11 to 2.13). Hooks, which run as written, are exempt."""
    functions = (node for node in module.nodes if isinstance(node, ast.ClassDef) and _is_autograd_function(node))
    forwards = (one for node in functions for one in node.body if getattr(one, "name", "") == "forward")
    for one in forwards:
        assert isinstance(one, ast.FunctionDef)
        if one.args.vararg and len(one.args.args) > 1 and module.name != "engine/data/apply.py":
            yield f"forward (line {one.lineno})"


def _is_autograd_function(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("autograd.Function") for base in node.bases)


def class_names(read: Iterable[Module]) -> dict[str, list[str]]:
    """The modules that define each class."""
    found: dict[str, list[str]] = {}
    for module in read:
        for node in module.nodes:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module.name)
    return found


# -- text becomes data in one place, which has limits ------------------------------------------------------------------

PARSERS = ("json.loads", "json.load", "yaml.load", "yaml.safe_load", "tomllib.loads", "tomllib.load")
# What these read a process of the same run wrote a moment before, into a pipe, a socket or a file of its own.
OWN_MESSAGES = (
    "generation/files.py", "generation/ranks.py", "ui/children.py", "run/storage/keeper_store.py",
    "training/checkpoint/save.py", "engine/torch_private.py", "measure/doctor/software.py", "launch/",
)  # fmt: skip


def parses_by_itself(module: Module) -> Iterator[str]:
    """`spec/files.py` bounds what a file can ask for; a reader of files that goes around it is not bounded."""
    if module.name == "spec/files.py" or module.name.startswith(OWN_MESSAGES):
        return
    for node in module.nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in PARSERS:
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


# -- errors name settings, each surface has its words for them --------------------------------------------------------

ERRORS = {
    "SpecError", "DoesNotFit", "StageFailed", "NotPriced", "RankLost", "HostLost", "exclusive", "whole_number",
    "amount", "parse", "path_text", "texts", "require_writable", "write_text", "not_written", "require_cores",
    "require_devices", "require_packages", "require_prompt", "under",
}  # fmt: skip
# Other frameworks' options; the command line, which says flags; what reads one from a command.
FOREIGN_OPTIONS = ("interop/frameworks/", "cli/", "launch/node.py")
_COMMAND = re.compile(r"`[^`]*`")
_SETTING = re.compile(r"⟨([\w.]+)(=true|=false)?")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@cache
def own_flags() -> frozenset[str]:
    """The flags of all verbs."""
    return frozenset(flag.name for verb in VERBS for flag in words_of(verb).flags)


def flags_in_errors(module: Module) -> Iterator[str]:
    """Texts of errors name a setting by ⟨keyword⟩; the command line makes a flag of it. Commands in ` ` stay."""
    if module.name.startswith(FOREIGN_OPTIONS):
        return
    calls = [node for node in module.nodes if isinstance(node, ast.Call) and _function(node) in ERRORS]
    given = [value for call in calls for value in (*call.args, *(keyword.value for keyword in call.keywords))]
    names = {inner.id for value in given for inner in ast.walk(value) if isinstance(inner, ast.Name)}
    for node in module.nodes:  # what a name stands for that is given to one of them
        if isinstance(node, ast.Assign | ast.For):
            target, value = (node.target, node.iter) if isinstance(node, ast.For) else (node.targets[0], node.value)
            if names & {inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name)}:
                given.append(value)
    for value in given:
        text = _COMMAND.sub("", "".join(_constants(*ast.walk(value))))
        yield from (f"line {value.lineno}: {flag}" for flag in sorted(own_flags() & {*_FLAG.findall(text)}))


def unknown_settings(module: Module) -> Iterator[str]:
    """Marks name keywords that have a flag, or fields of a job."""
    if module.name == "spec/errors.py":
        return
    for name, value in sorted(set(_SETTING.findall(module.text))):
        if name not in job_fields() and in_flags(f"⟨{name}{value}⟩") not in own_flags():
            yield f"{name}{value}"


def _function(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


RULES: tuple[Callable[[Module], Iterator[str]], ...] = (
    imports_from_above,
    knows_a_price,
    labels_taken_apart,
    rank_arithmetic,
    schedule_names_asked,
    too_long,
    says_nothing,
    private_torch,
    arguments_dynamo_miscounts,
    parses_by_itself,
    flags_in_errors,
    unknown_settings,
)
