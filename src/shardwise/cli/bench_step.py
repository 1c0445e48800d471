"""`shardwise bench step`: one training step on this machine's device, beside its prediction."""

from __future__ import annotations

from argparse import Namespace

from shardwise.cli.arguments import add_job_arguments
from shardwise.cli.inputs import job_from, require_torch
from shardwise.cli.on_target import add_target_argument, run_on_target, target_of_verb, without_option
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.report.formats import versioned
from shardwise.report.progress import status
from shardwise.run.environment import Started, started
from shardwise.spec.errors import SpecError

STEPS, WARMUP = 10, 5
_EXAMPLE = """
shardwise bench step --model tiny --global-batch 4 --microbatch 4 --seq 128 --precision fp32 --steps 5
shardwise bench step --model gpt2 --global-batch 8 --microbatch 8 --seq 1024 --compile --json
torchrun --nproc-per-node 8 -m shardwise bench step --model llama3-8b --cluster dgx-h100:1 --zero 3 --global-batch 8
"""
_FIRST = "--model --cluster --global-batch --microbatch --seq --precision --compile --steps --warmup --on"
_DOES = """Trains a model for a few steps on random tokens, as `train` would, and prints the time of a step, tokens/s,
MFU and memory beside what the planner predicts. Without --cluster the device is this machine's GPU, or its CPU."""


def run(arguments: list[str]) -> int:
    parser = Parser("bench step", _DOES, _EXAMPLE, _FIRST)
    add_job_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="compile every layer (training.compile)")
    parser.add_argument("--graphs", choices=("auto", "true", "false"), help="one CUDA graph per step (training.graphs)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, metavar="N", help=f"steps to train; all are timed (default {STEPS})"
    )
    parser.add_argument(
        "--warmup", type=int, default=WARMUP, metavar="N", help=f"untimed runs before; of the step (default {WARMUP})"
    )
    nvtx = "mark steps, their phases and layers as NVTX ranges for nsys; the timed ones"
    parser.add_argument("--nvtx", action="store_true", help=nvtx)
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="seed of what is random; weights and tokens (default 0)"
    )
    add_target_argument(parser)
    add_output_arguments(parser)
    parsed = parser.parse(arguments)
    for name in ("steps", "warmup"):
        if getattr(parsed, name) < 1:
            raise SpecError(f"--{name}", f"{getattr(parsed, name)} is too few", "give 1 or more")
    require_torch("bench")
    from shardwise.engine.refuse import require_nvtx
    from shardwise.measure.step import measure_step, require_measurable
    from shardwise.report.bench import step_data, step_page

    here = started()
    target = target_of_verb(parsed.on, here)
    if target is not None and parsed.job is None and parsed.cluster is None:
        raise SpecError("--cluster", "is missing: it says how many ranks", "such as dgx-h100:2")
    _complete(parsed, here)
    job = job_from(parsed, runs_here=True)
    if target is not None:
        return run_on_target(target, job, ["bench", "step", *without_option(arguments, "--on")])
    if parsed.nvtx:
        require_nvtx(job, "--nvtx")
    require_measurable(job, here)
    quiet = parsed.json or (here is not None and here.rank > 0)
    with status("starting", quiet=quiet) as update:
        measured = measure_step(
            job, here, steps=parsed.steps, warmup=parsed.warmup, seed=parsed.seed, nvtx=parsed.nvtx, on_progress=update
        )  # fmt: skip
    if here is None or here.rank == 0:
        show(parsed, lambda: step_page(measured), lambda: versioned("bench step", step_data(measured)))
    return 0


def _complete(parsed: Namespace, here: Started | None) -> None:
    """Adds this machine's devices if no cluster is given, and the flags that set fields of the job's training."""
    from shardwise.measure.step import cluster_name_here, device_type_here

    parsed.set += ["training.compile=true"] if parsed.compile else []
    parsed.set += [f"training.graphs={parsed.graphs}"] if parsed.graphs else []
    if parsed.job is None and parsed.cluster is None:
        parsed.cluster = cluster_name_here(device_type_here())
        parsed.gpus = parsed.gpus or (1 if here is None else here.world)
