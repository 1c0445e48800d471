"""A task for SkyPilot: nodes with GPUs on any cloud or Kubernetes, recovered by its managed jobs.

SkyPilot starts the command on all nodes or none, with `SKYPILOT_...` variables, and ends all nodes when one fails. It
sizes shared memory itself: a share of the memory in containers, all of it on Kubernetes. Sources: the published
schema (tests/launch/targets/schemas); docs.skypilot.co "Distributed jobs", "Managed jobs", "Using containers".
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwise.launch.outcome import STOPS
from shardwise.launch.targets.manifest import (
    COMMON,
    OBJECT,
    URI,
    ManifestJob,
    is_mount,
    manifest_job,
    one_of,
    written_manifest,
)
from shardwise.launch.targets.registry import TargetOption, TargetRequest, Written
from shardwise.spec.errors import SpecError
from shardwise.spec.files import dump_documents

# Devices by SkyPilot's names (`sky show-gpus --all`).
_ACCELERATORS = {
    "a100-40gb": "A100",
    "a100-80gb": "A100-80GB",
    "a10g": "A10G",
    "b200": "B200",
    "b300": "B300",
    "gb200": "GB200",
    "gh200": "GH200",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "l4": "L4",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "rtx-5090": "RTX5090",
    "t4": "T4",
    "v100-sxm-16gb": "V100",
    "v100-sxm-32gb": "V100-32GB",
}
_JOB, _END = "/tmp/shardwise/job.yaml", "END_OF_JOB"
_ACCELERATOR = re.compile(r"[A-Za-z][\w-]*")
_PLAIN = re.compile(r"[^\s\0]+")
OPTIONS = {
    **COMMON,
    "runs": TargetOption("the name of a SkyPilot volume for the runs", OBJECT.fullmatch),
    "data": TargetOption(
        "a bucket such as s3://bucket/corpus, or a SkyPilot volume",
        lambda text: URI.fullmatch(text) or OBJECT.fullmatch(text),
    ),
    "volume": TargetOption("a SkyPilot volume and its folder, such as models:/models", is_mount, several=True),
    "memory": TargetOption("GB of memory such as 500, or 500+", re.compile(r"\d+(\.\d+)?\+?").fullmatch),
    "infra": TargetOption("a place such as aws/us-east-1 or k8s", _PLAIN.fullmatch),
    "accelerator": TargetOption("SkyPilot's name of a GPU, such as H100", _ACCELERATOR.fullmatch),
    "spot": TargetOption("true or false", one_of("true", "false")),
}


def write_for(request: TargetRequest, *, run_name: str, grace_seconds: float = 30) -> Written:
    run = manifest_job(request, run_name, grace_seconds)
    return written_manifest(dump_documents([task(run)]), request, run_name, ("sky", "jobs", "launch"))


def task(run: ManifestJob) -> dict[str, Any]:
    options = run.options
    for name in options.env:
        if name.startswith("SKYPILOT_"):
            raise SpecError("⟨on⟩", f"env {name} follows from the job", "leave it out")
    buckets = {mount.path: {"source": mount.source, "mode": "MOUNT"} for mount in options.all_mounts if mount.is_uri}
    volumes = {mount.path: mount.source for mount in options.all_mounts if not mount.is_uri}
    made = {
        "name": run.name,
        "num_nodes": run.nodes,
        "resources": _resources(run),
        "envs": dict(options.env),
        "file_mounts": buckets,
        "volumes": volumes,
        "setup": _setup(run),
        "run": _run(run),
    }
    return {name: value for name, value in made.items() if value not in ({}, None)}


def _resources(run: ManifestJob) -> dict[str, Any]:
    options = run.options
    made: dict[str, Any] = {"image_id": f"docker:{options.image}"}
    if run.is_gpu:
        made["accelerators"] = {_accelerator(run): run.ranks_per_node}
        if run.nodes > 1:
            made["network_tier"] = "best"
    if options.infra is not None:
        made["infra"] = options.infra
    cpus = options.cpu or (None if run.is_gpu else f"{run.ranks_per_node}+")
    made |= {name: value for name, value in (("cpus", cpus), ("memory", options.memory)) if value is not None}
    if options.spot:
        made["use_spot"] = True
    return {
        **made,
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION",
            "max_restarts_on_errors": run.job.run.restarts.most,
            "recover_on_exit_codes": list(STOPS),
        },
    }


def _accelerator(run: ManifestJob) -> str:
    if run.options.accelerator is not None:
        return run.options.accelerator
    device = run.job.cluster.device.name
    if device not in _ACCELERATORS:
        remedy = "give it: ⟨on=skypilot,accelerator=NAME⟩"
        raise SpecError("cluster", f"SkyPilot's name of {device} is not known", remedy)
    return _ACCELERATORS[device]


def _setup(run: ManifestJob) -> str:
    text = run.job.to_yaml()
    assert _END not in text
    return f"mkdir -p {Path(_JOB).parent}\ncat > {_JOB} <<'{_END}'\n{text}{_END}\n"


def _run(run: ManifestJob) -> str:
    """The script; for CPU ranks it also sets SkyPilot's number of GPUs, from which ranks are counted."""
    ranks = "" if run.is_gpu else f"export SKYPILOT_NUM_GPUS_PER_NODE={run.ranks_per_node}\n"
    return ranks + run.script(_JOB)
