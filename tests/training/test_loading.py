"""What loading holds: never more than what stays, the slice of one tensor as it is read, and some rows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.workers import on_ranks
from shardwise.spec import Job
from shardwise.spec.parameters import parameter_count

MODEL = {"name": "loaded", "layers": 6, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 1024,
         "activation": "swiglu", "norm": "rmsnorm"}  # fmt: skip
LARGEST = 1024 * 256 * 4  # bytes of the largest tensor, in fp32
WHOLE = 4 * parameter_count(Job.from_dict({"model": MODEL, "cluster": "laptop:1"}).model)


def job_of(devices: int, strategy: dict[str, Any], **training: Any) -> Job:
    given = {"seq": 32, "global_batch": 8, "precision": "fp32", **training}
    return Job.from_dict({"model": MODEL, "cluster": f"laptop:{devices}", "strategy": strategy, "training": given})


def exported(job: Job, folder: str) -> None:
    from shardwise.engine.engine import Engine
    from shardwise.models.huggingface import write_folder

    (stage,) = Engine(job, seed=1).stages.values()
    write_folder(Path(folder), job.model, stage.named_parameters())


def held(job: Job, folder: str) -> tuple[int, int]:
    """Bytes in tensors at the peak of building and filling a rank's stages, and what is left of them."""
    from shardwise.engine.engine import Engine
    from shardwise.models import weight_formats
    from shardwise.training.checkpointing import start_from
    from shardwise.training.memory import tensors_counted

    weight_formats.ELEMENTS_AT_ONCE = 2**14
    with tensors_counted() as memory:
        engine = Engine(job, seed=5)
        start_from(engine, Path(folder))
        return memory.peak, memory.live


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("loaded") / "hf")
    on_ranks(1, exported, job_of(1, {}), path)
    return path


ADAPTERS = {"rank": 4}
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "all": (1, {}, {}),
    "all-zero3": (2, {"dp": 2, "zero": 3}, {}),
    "lora": (1, {}, {"adapters": ADAPTERS}),
    "nf4": (1, {}, {"adapters": ADAPTERS, "base_precision": "nf4-double"}),
    "nf4-zero3": (2, {"dp": 2, "zero": 3}, {"adapters": ADAPTERS, "base_precision": "nf4-double"}),
    "nf4-tp": (2, {"tp": 2}, {"adapters": ADAPTERS, "base_precision": "nf4"}),
    "int8-pp": (2, {"pp": 2}, {"adapters": ADAPTERS, "base_precision": "int8"}),
    "fp8": (1, {}, {"adapters": ADAPTERS, "base_precision": "fp8"}),
    "nf4-bf16": (1, {}, {"adapters": ADAPTERS, "base_precision": "nf4-double", "precision": "bf16"}),
    "bf16": (1, {}, {"adapters": ADAPTERS, "precision": "bf16"}),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("case", CASES)
def test_loading_holds_one_tensor_as_read_and_as_kept_beside_what_stays(case: str, folder: str) -> None:
    devices, strategy, training = CASES[case]
    for peak, live in on_ranks(devices, held, job_of(devices, strategy, **training), folder):
        assert peak - live < 2.5 * LARGEST < WHOLE / 8
