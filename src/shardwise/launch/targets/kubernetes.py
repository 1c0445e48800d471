"""Manifests for Kubernetes: a TrainJob of Kubeflow Trainer v2 with its runtime, or a JobSet; one pod per node.

Both make the same pods. A failed pod ends its Job (`backoffLimit: 0`), and JobSet starts all pods again, as often as
the job's restarts; the run resumes from its last checkpoint. Sources: the published schemas
(tests/launch/targets/schemas); kubernetes.io "Pod failure policy" and its controller's messages; jobset.sigs.k8s.io
"Failure policy"; kubeflow.org "Job template", "ML policy" and "Gang scheduling" of Trainer; volcano.sh on annotations
of Jobs.
"""

from __future__ import annotations

import re
from typing import Any

from shardwise.launch.outcome import STOPS
from shardwise.launch.targets.manifest import (
    COMMON,
    END_SECONDS,
    JOB_FILE,
    JOB_FOLDER,
    OBJECT,
    RESOURCE,
    RUNS,
    USER_ID,
    ManifestJob,
    is_bytes,
    is_mount,
    manifest_job,
    one_of,
    written_manifest,
)
from shardwise.launch.targets.registry import TargetOption, TargetRequest, Written
from shardwise.run.environment import PORT
from shardwise.spec.errors import SpecError
from shardwise.spec.files import dump_documents
from shardwise.spec.installation import SHARED_BYTES

NODE = "node"  # Trainer looks for a replicated job and a container of this name
MOST_JOB_BYTES = 2**20  # of a ConfigMap
_GPUS = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}
_TRAINER, _JOBSET = "trainer.kubeflow.org/v1alpha1", "jobset.x-k8s.io/v1alpha2"
_SCHEDULERS = {"volcano": "volcano", "coscheduling": "scheduler-plugins-scheduler"}  # as their charts install them
_SCHEDULE_SECONDS = 600  # for a gang to find room, before it is queued again
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kKMGTP]i?)?")
_SELECTOR = re.compile(r"[A-Za-z0-9][-\w./]*=[-\w.]*")
OPTIONS = {
    **COMMON,
    "memory": TargetOption("an amount of memory such as 500Gi", _QUANTITY.fullmatch),
    "kind": TargetOption("trainjob or jobset", one_of("trainjob", "jobset")),
    "namespace": TargetOption("a namespace", OBJECT.fullmatch),
    "runs": TargetOption("the name of a claim for the runs", OBJECT.fullmatch),
    "data": TargetOption("the name of a claim with the data", OBJECT.fullmatch),
    "volume": TargetOption("a claim and its folder: models:/models or models:/models:ro", is_mount, several=True),
    "shm": TargetOption("an amount of memory such as 16GiB", is_bytes),
    "gang": TargetOption("coscheduling, volcano or none", one_of("coscheduling", "volcano", "none")),
    "scheduler": TargetOption("the name of a scheduler", OBJECT.fullmatch),
    "queue": TargetOption("the name of a Kueue queue", OBJECT.fullmatch),
    "rdma": TargetOption("a resource and its number, such as rdma/ib:8", RESOURCE.fullmatch),
    "secret": TargetOption("the name of a secret whose entries are variables", OBJECT.fullmatch),
    "pull-secret": TargetOption("the name of a secret for the image's registry", OBJECT.fullmatch),
    "service-account": TargetOption("the name of a service account", OBJECT.fullmatch),
    "node-selector": TargetOption("a label such as pool=h100", _SELECTOR.fullmatch, several=True),
}


def write_for(request: TargetRequest, *, run_name: str, grace_seconds: float = 30) -> Written:
    run = manifest_job(request, run_name, grace_seconds)
    return written_manifest(dump_documents(documents(run)), request, run_name, ("kubectl", "apply", "-f"))


def documents(run: ManifestJob) -> list[dict[str, Any]]:
    """The manifests, in the order in which they must be created."""
    _require_possible(run)
    made = [_config_map(run)]
    if run.options.kind == "jobset":
        return [*made, _job_set(run)]
    return [*made, _runtime(run), _train_job(run)]


def _require_possible(run: ManifestJob) -> None:
    options = run.options
    if run.nodes > 1 and options.gang is None and options.queue is None:
        remedy = "gang=coscheduling, volcano or none, or queue=NAME of Kueue: what the cluster has"
        raise SpecError("⟨on⟩", f"gang is missing: {run.nodes} pods must start together or not at all", remedy)
    if options.gang == "coscheduling" and options.kind == "jobset":
        problem = "gang=coscheduling needs a pod group, which Kubeflow Trainer makes and JobSet does not"
        raise SpecError("⟨on⟩", problem, "use kind=trainjob, gang=volcano, or queue=NAME")
    if run.is_gpu and run.job.cluster.device.vendor not in _GPUS:
        problem = f"Kubernetes has no resource for {run.job.cluster.device.name} that this engine runs on"
        raise SpecError("cluster", problem, f"use devices of {' or '.join(_GPUS)}")
    if any(mount.is_uri for mount in options.mounts):
        raise SpecError("⟨on⟩", "a claim is wanted, not a URI", "name URIs in the job")
    for name in options.env:
        if name.startswith("PET_"):
            raise SpecError("⟨on⟩", f"env {name} follows from the job", "leave it out")
    if len(run.job.to_yaml().encode()) > MOST_JOB_BYTES:
        raise SpecError("job file", "is larger than 1 MiB, the limit of a ConfigMap", "name a model of the catalogue")


def _metadata(run: ManifestJob, name: str, **labels: str) -> dict[str, Any]:
    made: dict[str, Any] = {"name": name}
    if run.options.namespace is not None:
        made["namespace"] = run.options.namespace
    common = {"app.kubernetes.io/name": "shardwise", "app.kubernetes.io/instance": run.name}
    return {**made, "labels": {**common, **labels}}


def _queued(run: ManifestJob) -> dict[str, str]:
    return {} if run.options.queue is None else {"kueue.x-k8s.io/queue-name": run.options.queue}


def _config_map(run: ManifestJob) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(run, f"{run.name}-job"),
        "data": {JOB_FILE: run.job.to_yaml()},
    }


def _train_job(run: ManifestJob) -> dict[str, Any]:
    """Trainer's torch policy gives every pod the variables that name its rank and world (`PET_...`)."""
    return {
        "apiVersion": _TRAINER,
        "kind": "TrainJob",
        "metadata": _metadata(run, run.name, **_queued(run)),
        "spec": {
            "runtimeRef": {"apiGroup": _TRAINER.partition("/")[0], "kind": "TrainingRuntime", "name": run.name},
            "trainer": {"numNodes": run.nodes, "numProcPerNode": run.ranks_per_node},
        },
    }


def _runtime(run: ManifestJob) -> dict[str, Any]:
    spec: dict[str, Any] = {"mlPolicy": {"numNodes": run.nodes, "torch": {}}}
    if run.options.gang == "coscheduling":
        spec["podGroupPolicy"] = {"coscheduling": {"scheduleTimeoutSeconds": _SCHEDULE_SECONDS}}
    elif run.options.gang == "volcano":
        spec["podGroupPolicy"] = {"volcano": {}}
    labels = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {
        "apiVersion": _TRAINER,
        "kind": "TrainingRuntime",
        "metadata": _metadata(run, run.name, **{"trainer.kubeflow.org/framework": "torch"}),
        "spec": {**spec, "template": {"spec": _job_set_spec(run, {"metadata": {"labels": labels}}, [])}},
    }


def _job_set(run: ManifestJob) -> dict[str, Any]:
    """Its pods find each other by name, through the headless Service that JobSet creates."""
    job: dict[str, Any] = {}
    if run.options.gang == "volcano":  # it makes the pod group of a Job by itself
        job["metadata"] = {"annotations": {"scheduling.volcano.sh/group-min-member": str(run.nodes)}}
    places: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(run.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(run.ranks_per_node)},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}},
        {"name": "PET_MASTER_ADDR", "value": f"{run.name}-{NODE}-0-0.{run.name}"},
        {"name": "PET_MASTER_PORT", "value": str(PORT)},
    ]
    network = {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": run.name}
    return {
        "apiVersion": _JOBSET,
        "kind": "JobSet",
        "metadata": _metadata(run, run.name, **_queued(run)),
        "spec": {"network": network, **_job_set_spec(run, job, places)},
    }


def _job_set_spec(run: ManifestJob, job: dict[str, Any], places: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "failurePolicy": _failure_policy(run),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {**job, "spec": _job_spec(run, places)}}],
    }


def _failure_policy(run: ManifestJob) -> dict[str, Any]:
    """A mistake ends the run; a stopped or evicted pod is restarted freely; any other failure counts as a restart."""
    statuses = "|".join(map(str, run.final_statuses))
    by_policy = {"onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "maxRestarts": run.job.run.restarts.most,
        "rules": [
            {
                "name": "final",
                "action": "FailJobSet",
                **by_policy,
                "onJobFailureMessagePatterns": [f"failed with exit code ({statuses}) matching"],
            },
            {"name": "stopped", "action": "RestartJobSetAndIgnoreMaxRestarts", **by_policy},
        ],
    }


def _job_spec(run: ManifestJob, places: list[dict[str, Any]]) -> dict[str, Any]:
    def ended_with(statuses: list[int]) -> dict[str, Any]:
        return {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": statuses}}

    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {
        "completionMode": "Indexed",
        "completions": run.nodes,
        "parallelism": run.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [ended_with(run.final_statuses), ended_with(list(STOPS)), disrupted]},
        "template": {"spec": _pod(run, places)},
    }


def _pod(run: ManifestJob, places: list[dict[str, Any]]) -> dict[str, Any]:
    """Meets the strictest of Kubernetes' pod security standards, unless it locks memory for RDMA."""
    options = run.options
    volumes = _volumes(run)
    made: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(run.grace_seconds) + END_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER_ID,
            "runAsGroup": USER_ID,
            "fsGroup": USER_ID,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    if options.service_account is None:
        made["automountServiceAccountToken"] = False
    else:
        made["serviceAccountName"] = options.service_account
    scheduler = options.scheduler or _SCHEDULERS.get(options.gang or "")
    if scheduler is not None:
        made["schedulerName"] = scheduler
    if options.node_selector:
        made["nodeSelector"] = dict(options.node_selector)
    if run.is_gpu:
        made["tolerations"] = [{"key": _gpus(run), "operator": "Exists", "effect": "NoSchedule"}]
    if options.pull_secret is not None:
        made["imagePullSecrets"] = [{"name": options.pull_secret}]
    container = _container(run, places, [mount for mount, _ in volumes])
    return {**made, "containers": [container], "volumes": [volume for _, volume in volumes]}


def _container(run: ManifestJob, places: list[dict[str, Any]], mounts: list[dict[str, Any]]) -> dict[str, Any]:
    options = run.options
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if options.rdma is not None:
        capabilities["add"] = ["IPC_LOCK"]
    made: dict[str, Any] = {
        "name": NODE,
        "image": options.image,
        "command": ["bash", "-c", run.script(f"{JOB_FOLDER}/{JOB_FILE}")],
        "env": [*places, *({"name": name, "value": value} for name, value in options.env.items())],
        "resources": _resources(run),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": mounts,
    }
    if options.secret is not None:
        made["envFrom"] = [{"secretRef": {"name": options.secret}}]
    return {name: value for name, value in made.items() if value != []}


def _gpus(run: ManifestJob) -> str:
    return _GPUS[run.job.cluster.device.vendor]


def _resources(run: ManifestJob) -> dict[str, Any]:
    """GPUs and RDMA devices are limits; a CPU rank requests a core."""
    options = run.options
    limits: dict[str, int | str] = {_gpus(run): run.ranks_per_node} if run.is_gpu else {}
    if options.rdma is not None:
        limits[options.rdma[0]] = options.rdma[1]
    requests = {"cpu": options.cpu or (None if run.is_gpu else str(run.ranks_per_node)), "memory": options.memory}
    made = {"requests": {name: value for name, value in requests.items() if value is not None}, "limits": limits}
    return {name: value for name, value in made.items() if value}


def _volumes(run: ManifestJob) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pairs of a mount and its volume. Without a claim for the runs, each pod has a folder that is lost with it."""
    memory = {"medium": "Memory", "sizeLimit": f"{-(-shared_bytes(run) // 2**20)}Mi"}
    made: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"name": "shm", "mountPath": "/dev/shm"}, {"name": "shm", "emptyDir": memory}),
        (
            {"name": "job", "mountPath": JOB_FOLDER, "readOnly": True},
            {"name": "job", "configMap": {"name": f"{run.name}-job"}},
        ),
    ]
    if run.options.runs is None:
        made.append(({"name": "runs", "mountPath": RUNS}, {"name": "runs", "emptyDir": {}}))
    for number, given in enumerate(run.options.all_mounts):
        name = "runs" if given.path == RUNS else f"volume-{number}"
        mount: dict[str, Any] = {"name": name, "mountPath": given.path}
        claim: dict[str, Any] = {"claimName": given.source}
        if given.read_only:
            mount["readOnly"] = claim["readOnly"] = True
        made.append((mount, {"name": name, "persistentVolumeClaim": claim}))
    return made


def shared_bytes(run: ManifestJob) -> int:
    """Size of /dev/shm: as given, or an amount per rank plus the data that is staged there."""
    if run.options.shared_memory_bytes is not None:
        return run.options.shared_memory_bytes
    data = run.job.run.data
    staged = int(data.stage_limit) if data.stage == "memory" else 0
    return SHARED_BYTES[run.job.run_device] * run.ranks_per_node + staged
