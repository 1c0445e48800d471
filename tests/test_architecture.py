"""What may import what, and what stays out of a quick command; by reading the source, and by trying."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shardwise"
# Lowest first: each imports only itself and what stands before it.
PACKAGES = ["spec", "interop", "collectives", "pipeline", "layout", "cost", "planner", "models", "engine", "training",
            "launch", "measure", "report", "api", "cli"]  # fmt: skip
WITH_TORCH = {"models", "engine", "training", "measure"}
MOST_LINES = 500
NOT_OURS = {".venv", "build", "dist", "runs", "__pycache__"}
# Folders of the machine this was written on; joined here so that this file does not name them itself.
FOREIGN = ["/" + "work/", " shared" + "/", '"shared' + "/"]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def package_of(path: Path) -> str:
    """The package of a module; "" for the modules of the root, which only hand on."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else ""


def imported(tree: ast.AST, path: Path) -> Iterator[str]:
    """The dotted name of everything that any import statement of a module names, wherever it stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ("shardwise", *path.relative_to(SOURCE).parts[:-1])
                base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def faults(source: str, path: Path) -> list[str]:
    """The imports in a module's source that its package may not make."""
    package = package_of(path)
    names = set(imported(ast.parse(source), path))
    found = []
    for name in sorted(names):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "torch" and package not in WITH_TORCH:
            found.append(f"{name} (torch belongs to {', '.join(sorted(WITH_TORCH))})")
        if top == "shardwise" and package and other in PACKAGES and PACKAGES.index(other) > PACKAGES.index(package):
            found.append(f"{name} ({package} stands below {other})")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_module_imports_only_what_stands_below_it(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8"), path) == []


def test_every_package_is_in_the_list() -> None:
    present = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert present <= set(PACKAGES)


@pytest.mark.parametrize(
    ("source", "module", "refused"),
    [
        ("import torch", "spec/x.py", True),
        ("def f():\n    from torch.nn import Module", "cost/x.py", True),
        ("import torch.distributed as dist", "cli/x.py", True),
        ("import torch", "engine/x.py", False),
        ("import torchvision", "cost/x.py", False),
        ("from shardwise.cost import analysis", "spec/x.py", True),
        ("from shardwise import report", "cost/x.py", True),
        ("from ..cost.analysis import analyze", "collectives/x.py", True),
        ("from .errors import SpecError", "spec/x.py", False),
        ("from ...spec import units", "cost/communication/x.py", False),
        ("from shardwise.spec import Job", "cli/x.py", False),
    ],
)
def test_the_check_itself_finds_what_is_wrong(source: str, module: str, refused: bool) -> None:
    assert bool(faults(source, SOURCE / module)) == refused


# -- what a quick command imports --------------------------------------------------------------------

WATCH = """
import json, sys

class Watch:
    asked = set()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ray", "numpy"):
            self.asked.add(name.partition(".")[0])
        return None

sys.meta_path.insert(0, Watch())
try:
    exec(sys.argv[1])
except (SystemExit, ImportError) as end:
    assert getattr(end, "code", 0) in (0, None), end
print("\\nASKED", json.dumps(sorted(Watch.asked)))
"""


def asked_for(code: str) -> set[str]:
    """Which of torch, ray and numpy a fresh interpreter tries to import for ``code``, installed or not."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        [sys.executable, "-c", WATCH, code], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout.rpartition("ASKED ")[2]))


def command(arguments: str) -> str:
    return f"from shardwise.cli.main import main\nassert main({arguments.split()!r}) == 0"


@pytest.mark.parametrize("name", ["torch", "ray", "numpy"])
def test_an_import_is_noticed_even_where_the_package_is_not_installed(name: str) -> None:
    assert name in asked_for(f"import {name}")
    assert asked_for(f"try:\n    import {name}.anything\nexcept ImportError:\n    pass") >= {name}


@pytest.mark.parametrize(
    "code", ["import shardwise", "import shardwise.cli.main", "from shardwise import Job, analyze"]
)
def test_importing_shardwise_stays_light(code: str) -> None:
    assert asked_for(code) == set()


JOB = "analyze --model llama3-70b --cluster dgx-h100:64 --tp 8 --pp 4 --zero 1 --global-batch 1024 --seq 8192"


@pytest.mark.parametrize(
    "arguments",
    [
        JOB,
        f"{JOB} --json",
        f"{JOB} --scaling",
        "analyze --model mixtral-8x7b --cluster dgx-h100:4 --ep 8 --zero 1 --global-batch 32 --json",
        "analyze --model gpt2 --topology torus --shape 4x4 --bandwidth 50GB/s --global-batch 16",
        "list models",
    ],
)
def test_one_job_is_priced_without_numpy(arguments: str) -> None:
    assert asked_for(command(arguments)) == set()


@pytest.mark.parametrize(
    "arguments", ["list collectives", "explain all-reduce", "explain zero", "explain tp", "--help"]
)
def test_a_quick_command_needs_neither_torch_nor_ray(arguments: str) -> None:
    assert asked_for(command(arguments)) <= {"numpy"}


# -- files -------------------------------------------------------------------------------------------


def files_of_the_project() -> Iterator[Path]:
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in NOT_OURS]
        inner[:] = [name for name in inner if not name.endswith(".egg-info")]
        yield from (Path(folder) / name for name in names if not name.startswith("."))


def test_a_module_can_be_read_in_one_sitting() -> None:
    counts = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
              for folder in ("src", "bench", "examples") for path in (ROOT / folder).rglob("*.py")}  # fmt: skip
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
