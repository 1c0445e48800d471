"""What may import what, and what stays out of a quick command; by reading the source, and by trying."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest

from source_rules import (
    FOREIGN_TEXT,
    MOST_LINES,
    ROOT,
    RULES,
    SOURCE,
    Module,
    arguments_dynamo_miscounts,
    class_names,
    flags_in_errors,
    imported,
    imports_from_above,
    in_circles,
    knows_a_price,
    labels_taken_apart,
    modules,
    packages,
    parsed_labels,
    parses_by_itself,
    private_torch,
    rank_arithmetic,
    says_nothing,
    schedule_names_asked,
    too_long,
    unknown_settings,
)
from tables import table

NOT_OURS = {".venv", "build", "dist", "runs", "__pycache__"}
# Folders of the machine this was written on; joined here so that this file does not name them itself.
FOREIGN = ["/" + "work/", " shared" + "/", '"shared' + "/"]

FUNCTION = "class F(torch.autograd.Function):\n"


# -- the source ----------------------------------------------------------------------------------------


def test_every_module_keeps_every_rule() -> None:
    """One walk; each fault with its module and the rule that it breaks."""
    assert len(modules()) > 200 and len(RULES) == 12
    found = [
        f"{module.name}: {rule.__name__}: {fault}" for module in modules() for rule in RULES for fault in rule(module)
    ]
    assert found == [], f"{len(found)} faults:\n" + "\n".join(found)


def test_no_modules_import_each_other() -> None:
    assert in_circles(modules()) == []
    low, high = Module("a/x.py", "from shardwise.a import y"), Module("a/y.py", "def f():\n    import shardwise.a.z")
    assert in_circles([low, high]) == []
    back = Module("a/y.py", "def f():\n    from shardwise.a.x import z")
    assert in_circles([low, back]) == ["shardwise.a.x", "shardwise.a.y"]


# What tests read lies beside them.
DATA = {"cli/golden", "interop/frameworks/published", "launch/targets/schemas"}


def test_tests_lie_in_the_room_of_what_they_test() -> None:
    folder = ROOT / "tests"
    tests = [Module(path.relative_to(folder).as_posix(), path.read_text("utf-8")) for path in folder.rglob("*.py")]
    assert {module.room for module in tests} <= {module.room for module in modules()} | DATA
    assert not {module.name: room for module in tests if "/test_" in module.name and (room := better_room(module))}
    flat = Module("engine/test_x.py", "from shardwise.engine.fp8.cast import a, b, c\nfrom shardwise.spec import d")
    assert better_room(flat) == "engine/fp8" and better_room(replace(flat, name="engine/fp8/test_x.py")) is None


def better_room(test: Module) -> str | None:
    """The room of its package that a test imports three names or more from, where it lies elsewhere and not by right.

    In a room of its own it may import as many from that; in the package's folder something from its modules.
    """
    rooms = {module.room for module in modules()}
    every = {name for name in imported(test) if name.startswith(f"shardwise.{test.package}.")}
    names = [name.split(".")[1:] for name in every if not any(other.startswith(f"{name}.") for other in every)]
    counts = Counter(next(room for end in range(len(name), 0, -1) if (room := "/".join(name[:end])) in rooms)
                     for name in names)  # fmt: skip
    own = counts[test.room]
    counts[test.package] = 0  # hands on what its rooms have
    room, most = max(counts.items(), key=itemgetter(1))
    by_right = own >= most if "/" in test.room else own > 0
    return room if test.package and most >= 3 and not by_right else None


def test_every_package_is_in_the_list() -> None:
    present = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert present == set(packages()), "docs/architecture.md lists the packages"


def test_the_architecture_draws_every_room() -> None:
    """A folder of a package, each in the row of its package."""
    text = (
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("## Rooms")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.MULTILINE)
    drawn = {f"{package}/{room}" for package, rooms in rows for room in re.findall(r"`(\w+)` \(", rooms)}
    assert drawn == {one.name.removesuffix("/__init__.py") for one in modules() if one.name.count("/") == 2
                     and one.name.endswith("/__init__.py")}  # fmt: skip


def test_every_file_that_the_architecture_names_is_there() -> None:
    """A star stands for any module of a folder."""
    named = set(re.findall(r"`((?:\w+/)+[\w*]+\.py)`", (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")))
    assert len(named) > 10
    assert [name for name in sorted(named) if not [*SOURCE.glob(name), *ROOT.glob(name)]] == []


def test_what_may_read_text_still_does() -> None:
    """A place that no longer reads text of others leaves the list."""
    for name in FOREIGN_TEXT:
        assert any(any(parsed_labels(one)) for one in modules() if one.name.startswith(name)), name


@table(
    ("rule", "source", "place", "refused"),
    [
        (imports_from_above, "import torch", "spec/x.py", True),
        (imports_from_above, "def f():\n    from torch.nn import Module", "cost/x.py", True),
        (imports_from_above, "import torch.distributed as dist", "cli/x.py", True),
        (imports_from_above, "import torch", "engine/x.py", False),
        (imports_from_above, "import torch", "x.py", True),
        (imports_from_above, "import torchvision", "cost/x.py", False),
        (imports_from_above, "from shardwise.cost import analysis", "spec/x.py", True),
        (imports_from_above, "from shardwise import report", "cost/x.py", True),
        (imports_from_above, "from ..cost.analysis import analyze", "collectives/x.py", True),
        (imports_from_above, "from .errors import SpecError", "spec/x.py", False),
        (imports_from_above, "from ...spec import units", "cost/traffic/x.py", False),
        (imports_from_above, "from shardwise.spec import Job", "cli/x.py", False),
        (knows_a_price, "from shardwise.cost.memory.states import StateBytes", "engine/data/x.py", True),
        (knows_a_price, "def f():\n    from shardwise import cost", "models/x.py", True),
        (knows_a_price, "from shardwise.layout.pieces import update_chunk", "engine/x.py", False),
        (knows_a_price, "from shardwise.cost.analysis import analyze", "measure/x.py", False),
        (labels_taken_apart, 'traffic.what.endswith("forward")', "cost/x.py", True),
        (labels_taken_apart, 'traffic.what in ("input gradients, backward", "saved inputs")', "cost/x.py", True),
        (labels_taken_apart, "traffic.what in NOT_DECOMPOSED", "cost/x.py", True),
        (labels_taken_apart, '"gradients" not in traffic.what', "report/x.py", True),
        (labels_taken_apart, 'name, _, stage = one.name.partition(" of stage ")', "measure/x.py", True),
        (labels_taken_apart, "re.fullmatch(pattern, name)", "planner/x.py", True),
        (labels_taken_apart, 'line.what == "loss"', "cost/x.py", True),
        (labels_taken_apart, 'line.what == "loss"', "spec/x.py", False),  # where users' text is read
        (labels_taken_apart, "traffic.payload.role is Role.LOSS", "cost/x.py", False),
        (labels_taken_apart, "np.split(array, 2)", "cost/x.py", False),
        (labels_taken_apart, 'f"{one.what}, hidden"', "cost/x.py", False),
        (labels_taken_apart, "one.what == what", "cost/x.py", False),
        (rank_arithmetic, "rank // node_devices", "cost/x.py", True),
        (rank_arithmetic, "rank // node_devices", "layout/x.py", False),
        (rank_arithmetic, "record.rank // stride % job.strategy.pp", "cost/x.py", True),
        (rank_arithmetic, "dist.get_rank() % 8", "cost/x.py", True),
        (rank_arithmetic, "rank.number % 4", "cost/x.py", True),
        (rank_arithmetic, "one.members[0] // inside", "cost/x.py", True),
        (rank_arithmetic, "rank //= strategy.degree(name)", "cost/x.py", True),
        (rank_arithmetic, "strategy.stride('pp')", "cost/x.py", True),
        (rank_arithmetic, "2 * p - 1 - rank", "cost/x.py", True),
        (rank_arithmetic, "last - rank", "cost/x.py", True),
        (rank_arithmetic, "tokens * rank // size", "cost/x.py", False),  # a rank's part of some tokens
        (rank_arithmetic, "(rank + 1) % size", "cost/x.py", False),  # the next of a ring
        (rank_arithmetic, "1 - rank", "cost/x.py", False),  # the other of two
        (rank_arithmetic, "tensor.stride()", "cost/x.py", False),
        (rank_arithmetic, "per_rank % strategy.cp", "cost/x.py", False),
        (rank_arithmetic, "ranks % expert_tp", "cost/x.py", False),  # a number of ranks
        (rank_arithmetic, "world // ranks_per_host", "cost/x.py", False),
        (schedule_names_asked, 'a == "zbv"', "spec/schedules.py", True),
        (schedule_names_asked, 'b in ("gpipe", "own")', "interop/frameworks/x.py", True),
        (schedule_names_asked, 'match c:\n    case "v-min":\n        pass', "pipeline/builders/x.py", True),
        (schedule_names_asked, 'd.startswith("dualpipe")', "spec/schedules.py", True),
        (schedule_names_asked, 'e = "1f1b"', "cost/x.py", True),
        (schedule_names_asked, 'e = "1f1b"', "spec/schedules.py", False),
        (too_long, "\n" * (MOST_LINES + 1), "cost/x.py", True),
        (too_long, "\n" * MOST_LINES, "cost/x.py", False),
        (private_torch, "from torch._C import Store", "engine/x.py", True),
        (private_torch, "from torch.distributed.tensor.debug import _clear", "engine/x.py", True),
        (private_torch, "torch._foreach_add_(a, b)", "training/x.py", True),
        (private_torch, "from torch._C import Store", "engine/torch_private.py", False),
        (private_torch, "import torch.__config__", "engine/x.py", False),
        (private_torch, "self._torch = torch.cuda", "engine/x.py", False),
        (private_torch, "tensor._local_tensor.zero_()", "training/x.py", True),
        (private_torch, "state._group = None", "engine/x.py", True),
        (private_torch, "self._group = group\nother._group.wait()", "engine/x.py", False),
        (private_torch, "self._actions", "cli/x.py", False),
        (arguments_dynamo_miscounts, f"{FUNCTION}    def forward(ctx, one, *others): ...", "models/x.py", True),
        (arguments_dynamo_miscounts, f"{FUNCTION}    def forward(ctx, *given): ...", "models/x.py", False),
        (arguments_dynamo_miscounts, f"{FUNCTION}    def forward(ctx, one, other): ...", "models/x.py", False),
        (parses_by_itself, "json.loads(path.read_bytes())", "training/x.py", True),
        (parses_by_itself, "json.loads(line)", "launch/x.py", False),
        (flags_in_errors, 'raise SpecError("--gpus", "is missing")', "api/x.py", True),
        (flags_in_errors, 'whole_number(value, "--top")', "planner/x.py", True),
        (flags_in_errors, 'how = f"leave --stack out: {a}"\nraise SpecError("stack", "no", how)', "api/x.py", True),
        (flags_in_errors, 'for flag in ("--top",):\n    raise SpecError(flag, "no")', "api/x.py", True),
        (flags_in_errors, 'notes.append("no sequence length is given (--seq)")', "api/x.py", False),
        (flags_in_errors, 'raise SpecError("", "no", "`shardwise train --profile ...` records it")', "api/x.py", False),
        (flags_in_errors, 'raise SpecError("⟨gpus⟩", "is missing", "srun --ntasks-per-node")', "api/x.py", False),
        (flags_in_errors, 'raise SpecError("--optimizer", "is not known")', "interop/frameworks/x.py", False),
        (flags_in_errors, 'subprocess.run(["sbatch", "--steps"])', "launch/x.py", False),
        (unknown_settings, 'f"give ⟨gpus={n}⟩ or ⟨framework⟩, or ⟨run.start_from=FOLDER⟩"', "api/x.py", False),
        (unknown_settings, '"give ⟨gpu=64⟩"', "api/x.py", True),
        (unknown_settings, '"give ⟨run.start=FOLDER⟩"', "api/x.py", True),
        (says_nothing, "import os", "cost/x.py", True),
        (says_nothing, '"""All."""\nimport os', "cost/x.py", False),
        (says_nothing, "", "cost/__init__.py", False),
    ],
)  # fmt: skip
def test_a_rule_finds_what_it_looks_for_and_nothing_else(
    rule: Callable[[Module], Iterator[str]], source: str, place: str, refused: bool
) -> None:
    assert any(rule(Module(place, source))) == refused


def test_a_class_has_a_name_of_its_own() -> None:
    assert {name: places for name, places in class_names(modules()).items() if len(places) > 1} == {}


def test_two_classes_of_one_name_are_found() -> None:
    read = [Module("cost/x.py", "class A: ..."), Module("spec/y.py", "class A: ...\nclass B: ...")]
    assert class_names(read) == {"A": ["cost/x.py", "spec/y.py"], "B": ["spec/y.py"]}


# -- what a quick command imports --------------------------------------------------------------------

WATCH = """
import json, sys

class Watch:
    asked = set()

    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in ("torch", "ray", "numpy"):
            self.asked.add(top)
            if told["refuse"]:
                raise ImportError(name)
        return None

told = json.loads(sys.argv[1])
sys.meta_path.insert(0, Watch())
for code in told["codes"]:
    try:
        exec(code)
    except (SystemExit, ImportError) as end:
        assert getattr(end, "code", 0) in (0, None), (code, end)
    print("\\nASKED", json.dumps(sorted(Watch.asked)))
    Watch.asked.clear()
"""


def asked_for(*codes: str, refuse: bool = False) -> dict[str, set[str]]:
    """Which of torch, ray and numpy a fresh interpreter tries to import for each code, installed or not.

    It runs one after the other: what one has imported, those after it need not.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", WATCH, json.dumps({"codes": codes, "refuse": refuse})]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    answers = [line.removeprefix("ASKED ") for line in result.stdout.splitlines() if line.startswith("ASKED ")]
    return {code: set(json.loads(answer)) for code, answer in zip(codes, answers, strict=True)}


def commands(*arguments: str) -> list[str]:
    return [f"from shardwise.cli.main import main\nassert main({one.split()!r}) == 0" for one in arguments]


def test_an_import_is_noticed_even_where_the_package_is_not_installed() -> None:
    names = ("torch", "ray", "numpy")
    plain = {f"import {name}": {name} for name in names}
    inner = {f"try:\n    import {name}.anything\nexcept ImportError:\n    pass": {name} for name in names}
    assert asked_for(*plain, *inner, refuse=True) == plain | inner
    assert asked_for("import numpy") == {"import numpy": {"numpy"}}


@pytest.mark.parametrize(
    "code", ["import shardwise", "import shardwise.cli.main", "from shardwise import Job, analyze"]
)
def test_importing_shardwise_stays_light(code: str) -> None:
    assert asked_for(code)[code] == set()


JOB = "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --zero 1 --global-batch 1024 --seq 8192"


def test_one_job_is_priced_without_numpy() -> None:
    found = asked_for(
        *commands(
            JOB,
            f"{JOB} --json",
            f"{JOB} --scaling",
            "analyze --model mixtral-8x7b --cluster dgx-h100:4 --ep 8 --zero 1 --global-batch 32 --json",
            "analyze --model gpt2 --topology torus --shape 4x4 --bandwidth 50GB/s --global-batch 16",
            "list models",
        )
    )
    assert {code: names for code, names in found.items() if names} == {}


def test_a_quick_command_needs_neither_torch_nor_ray() -> None:
    found = asked_for(
        *commands("list collectives", "explain all-reduce", "explain zero", "explain tp", "lab", "--help")
    )
    assert {code: names for code, names in found.items() if names - {"numpy"}} == {}


# -- files -------------------------------------------------------------------------------------------


def files_of_the_project() -> Iterator[Path]:
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in NOT_OURS]
        inner[:] = [name for name in inner if not name.endswith(".egg-info")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def test_a_script_can_be_read_in_one_sitting() -> None:
    """As the modules can."""
    counts = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
              for folder in ("bench", "examples") for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
    assert {name: lines for name, lines in counts.items() if lines > MOST_LINES} == {}


def test_no_file_names_a_folder_of_the_machine_it_was_written_on() -> None:
    named = []
    for path in files_of_the_project():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        named += [f"{path.relative_to(ROOT)}: {word!r}" for word in FOREIGN if word in text]
    assert named == []
