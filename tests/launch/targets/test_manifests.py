"""`--on kubernetes` and `--on skypilot`: manifests say what the job needs and pass the published schemas, closed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from cli.running import run as shardwise
from launch.targets.closed_schemas import objects_of, problems, published, with_unknown_fields
from launch.targets.test_hosts import refusal
from launch.targets.test_slurm import SMALL, losses, two_nodes
from measure.calibrate.test_hosts import free_port
from required import require
from shardwise.launch.targets.manifest import IMAGE, is_name, name_from
from shardwise.launch.targets.registry import TARGETS
from shardwise.spec.job import Job

LARGE = (
    "--model", "llama3-8b", "--cluster", "dgx-h100:2", "--tp", "8", "--zero", "1", "--seq", "4096", "--steps", "100",
    "--global-batch", "64",
)  # fmt: skip
EVERYTHING = {
    "kubernetes": (
        "name=my-run", "image=registry.example.com/shardwise:1", "cpu=64", "memory=500Gi", "env=NCCL_DEBUG=INFO",
        "namespace=ml", "runs=shared-runs", "data=corpus", "volume=models:/models:ro", "volume=scratch:/scratch",
        "shm=16GiB", "queue=gpus", "rdma=rdma/ib:8", "secret=store", "pull-secret=registry", "service-account=trainer",
        "node-selector=pool=h100", "scheduler=kai-scheduler",
    ),
    "skypilot": (
        "name=my-run", "image=registry.example.com/shardwise:1", "cpu=64", "memory=500+", "env=NCCL_DEBUG=INFO",
        "runs=shared-runs", "data=s3://bucket/corpus", "volume=models:/models", "infra=aws/us-east-1",
        "accelerator=H100", "spot=true",
    ),
}  # fmt: skip
CASES = {
    "trainjob": ("kubernetes", LARGE, ("runs=claim", "gang=coscheduling")),
    "trainjob-volcano": ("kubernetes", LARGE, ("runs=claim", "gang=volcano")),
    "trainjob-everything": ("kubernetes", LARGE, (*EVERYTHING["kubernetes"], "kind=trainjob")),
    "jobset": ("kubernetes", LARGE, ("kind=jobset", "runs=claim", "gang=volcano")),
    "jobset-everything": ("kubernetes", LARGE, (*EVERYTHING["kubernetes"], "kind=jobset")),
    "jobset-cpu": ("kubernetes", (*SMALL, "--cluster", "laptop:2"), ("kind=jobset", "runs=claim")),
    "skypilot": ("skypilot", LARGE, ("runs=volume",)),
    "skypilot-everything": ("skypilot", LARGE, EVERYTHING["skypilot"]),
    "skypilot-cpu": ("skypilot", (*SMALL, "--cluster", "laptop:2"), ("runs=volume",)),
}


def on(target: str, *options: str) -> tuple[str, str]:
    return "--on", ",".join((target, *options))


def rendered(target: str, job: tuple[str, ...], *given: str) -> list[dict[str, Any]]:
    found = shardwise("train", *job, *on(target, "out=-", *given))
    assert found.status == 0, found.err
    return list(yaml.safe_load_all(found.out))


def by_kind(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {one["kind"]: one for one in documents}


def job_set_spec(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found = by_kind(documents)
    spec = found["JobSet"]["spec"] if "JobSet" in found else found["TrainingRuntime"]["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def pod(documents: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = job_set_spec(documents)["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return found


# -- the schemas -------------------------------------------------------------------------------------------


def test_every_object_of_the_schemas_is_closed() -> None:
    for name in ("kubernetes", "skypilot"):
        found = dict(objects_of(published(name)))
        assert len(found) > 5
        assert [path for path, one in found.items() if one.get("additionalProperties") is not False] == []


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", CASES)
def test_manifests_pass_and_one_more_field_anywhere_does_not(case: str) -> None:
    documents = rendered(CASES[case][0], CASES[case][1], *CASES[case][2])
    for document in documents:
        assert problems(document) == []
        wrong = dict(with_unknown_fields(document))
        assert len(wrong) >= 2
        assert [path for path, one in wrong.items() if not problems(one)] == []


def test_a_wrong_value_does_not_pass_either() -> None:
    job_set = by_kind(rendered(*CASES["jobset"][:2], *CASES["jobset"][2]))["JobSet"]
    job_set["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] = "two"
    assert problems(job_set)
    assert problems({**job_set, "apiVersion": "jobset.x-k8s.io/v1"})


# -- what they say -----------------------------------------------------------------------------------------


def test_a_train_job_has_the_jobs_nodes_and_devices() -> None:
    documents = rendered("kubernetes", LARGE, "runs=claim", "gang=coscheduling")
    found = by_kind(documents)
    assert list(found) == ["ConfigMap", "TrainingRuntime", "TrainJob"]
    assert found["TrainJob"]["spec"] == {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "llama3-8b"},
        "trainer": {"numNodes": 2, "numProcPerNode": 8},
    }
    runtime = found["TrainingRuntime"]["spec"]
    assert runtime["mlPolicy"] == {"numNodes": 2, "torch": {}}
    assert runtime["podGroupPolicy"] == {"coscheduling": {"scheduleTimeoutSeconds": 600}}
    container = pod(documents)["containers"][0]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 8}}
    assert container["image"] == IMAGE
    assert "env" not in container  # Trainer's own, and a webhook refuses others of these names
    job = Job.from_yaml(found["ConfigMap"]["data"]["job.yaml"])
    assert (job.strategy.world, job.run.folder, job.run.steps) == (16, "/runs/llama3-8b", 100)


def test_a_job_set_starts_all_pods_again_unless_the_job_is_wrong() -> None:
    documents = rendered("kubernetes", (*LARGE, "--set", "run.restarts=5", "--grace", "90s"), *CASES["jobset"][2])
    spec = job_set_spec(documents)
    assert spec["network"] == {
        "enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": "llama3-8b"
    }  # fmt: skip
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (replicated["replicas"], job["completions"], job["parallelism"]) == (1, 2, 2)
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    final, stopped = spec["failurePolicy"]["rules"]
    assert spec["failurePolicy"]["maxRestarts"] == 5
    assert (final["action"], stopped["action"]) == ("FailJobSet", "RestartJobSetAndIgnoreMaxRestarts")
    # As Kubernetes' Job controller words it.
    message = "Container node for pod ns/run-node-0-1 failed with exit code {} matching FailJob rule at index 0"
    (pattern,) = final["onJobFailureMessagePatterns"]
    assert [status for status in (1, 2, 20, 75, 137) if re.search(pattern, message.format(status))] == [2]
    statuses = [one["onExitCodes"]["values"] for one in job["podFailurePolicy"]["rules"] if "onExitCodes" in one]
    assert statuses == [[2], [75, 76]]
    assert pod(documents)["terminationGracePeriodSeconds"] == 120
    environment = {one["name"]: one.get("value") for one in pod(documents)["containers"][0]["env"]}
    assert environment == {
        "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": None, "PET_MASTER_PORT": "29400",
        "PET_MASTER_ADDR": "llama3-8b-node-0-0.llama3-8b",
    }  # fmt: skip
    annotations = replicated["template"]["metadata"]["annotations"]
    assert annotations == {"scheduling.volcano.sh/group-min-member": "2"}
    assert pod(documents)["schedulerName"] == "volcano"


def test_on_one_node_the_launcher_has_restarted_the_ranks_itself() -> None:
    documents = rendered("kubernetes", (*SMALL, "--cluster", "laptop:2"), "runs=claim", "kind=jobset")
    rules = job_set_spec(documents)["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["onExitCodes"]["values"] == [1, 2]


def test_pods_have_volumes_shared_memory_and_no_privileges() -> None:
    documents = rendered("kubernetes", LARGE, *EVERYTHING["kubernetes"])
    found = pod(documents)
    volumes = {one["name"]: one for one in found["volumes"]}
    mounts = {one["mountPath"]: one for one in found["containers"][0]["volumeMounts"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16384Mi"}
    assert mounts["/dev/shm"]["name"] == "shm"
    claims = {path: volumes[one["name"]].get("persistentVolumeClaim") for path, one in mounts.items()}
    assert claims == {
        "/dev/shm": None, "/etc/shardwise": None, "/runs": {"claimName": "shared-runs"},
        "/data": {"claimName": "corpus", "readOnly": True}, "/models": {"claimName": "models", "readOnly": True},
        "/scratch": {"claimName": "scratch"},
    }  # fmt: skip
    assert volumes["job"]["configMap"]["name"] == by_kind(documents)["ConfigMap"]["metadata"]["name"]
    container = found["containers"][0]
    assert container["resources"] == {
        "requests": {"cpu": "64", "memory": "500Gi"}, "limits": {"nvidia.com/gpu": 8, "rdma/ib": 8}
    }  # fmt: skip
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert found["securityContext"]["runAsNonRoot"] is True
    assert by_kind(documents)["TrainJob"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert {one["metadata"]["namespace"] for one in documents} == {"ml"}


def test_shared_memory_grows_with_the_ranks_and_what_is_staged_there() -> None:
    def limit(*more: str) -> str:
        found = pod(rendered("kubernetes", (*LARGE, *more), "runs=claim", "queue=gpus"))
        return str(found["volumes"][0]["emptyDir"]["sizeLimit"])

    assert limit() == f"{8 * 1024}Mi"
    staged = ("--set", "run.data.stage=memory", "--set", "run.data.stage_limit=4GiB")
    assert limit(*staged) == f"{12 * 1024}Mi"


def test_a_task_of_skypilot() -> None:
    (task,) = rendered("skypilot", LARGE, *EVERYTHING["skypilot"])
    assert (task["name"], task["num_nodes"]) == ("my-run", 2)
    assert task["resources"] == {
        "image_id": "docker:registry.example.com/shardwise:1", "accelerators": {"H100": 8}, "network_tier": "best",
        "infra": "aws/us-east-1", "cpus": "64", "memory": "500+", "use_spot": True,
        "job_recovery": {
            "strategy": "EAGER_NEXT_REGION", "max_restarts_on_errors": 3, "recover_on_exit_codes": [75, 76]
        },
    }  # fmt: skip
    assert task["file_mounts"] == {"/data": {"source": "s3://bucket/corpus", "mode": "MOUNT"}}
    assert task["volumes"] == {"/runs": "shared-runs", "/models": "models"}
    written = re.search(r"<<'(\w+)'\n(.*)\1\n", task["setup"], re.DOTALL)
    assert written is not None and Job.from_yaml(written[2]).run.folder == "/runs/my-run"
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=task[part], text=True, check=True)


def test_without_a_volume_the_checkpoints_are_in_a_store() -> None:
    job = (*LARGE, "--set", "run.checkpoints.folder=s3://bucket/run", "--data", "s3://bucket/corpus")
    found = pod(rendered("kubernetes", job, "queue=gpus"))
    assert {"name": "runs", "emptyDir": {}} in found["volumes"]
    (task,) = rendered("skypilot", job)
    assert "volumes" not in task and "file_mounts" not in task


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "more", "said"),
    [
        ("kubernetes", (), "--on: runs is missing: no volume would keep the run; give runs=VOLUME"),
        ("kubernetes", ("runs=a",), "--on: gang is missing: 2 pods must start together or not at all"),
        ("kubernetes", ("runs=a", "gang=slurm"), "gang is coscheduling, volcano or none; write it like gang=..."),
        ("kubernetes", ("runs=a", "gang=coscheduling", "kind=jobset"), "which Kubeflow Trainer makes and JobSet does"),
        (
            "kubernetes",
            ("runs=A_b",),
            "'runs=A_b': runs is the name of a claim for the runs; write it like runs=...",
        ),
        ("kubernetes", ("runs",), "runs is the name of a claim"),
        ("kubernetes", ("runs=a", "runs=b"), "--on: runs is given twice; give it once"),
        ("kubernetes", ("imag=x",), "--on: 'imag' is not an option of kubernetes; did you mean image?"),
        ("kubernetes", ("spot=true",), "'spot' is not an option of kubernetes; it is for --on skypilot"),
        ("kubernetes", ("volume=a:/runs/x",), "volume a at /runs/x: /runs is another volume's"),
        ("kubernetes", ("volume=a:/",), "volume is a claim and its folder"),
        ("kubernetes", ("runs=a", "queue=q", "env=PET_NNODES=3"), "env PET_NNODES follows from the job"),
        ("kubernetes", ("env=A=1", "env=A=2"), "--on: A is given twice; give it once"),
        ("kubernetes", ("shm=lots",), "shm is an amount of memory such as 16GiB"),
        ("skypilot", ("runs=s3://bucket/x",), "runs is the name of a SkyPilot volume"),
        ("skypilot", ("runs=a", "env=SKYPILOT_NODE_RANK=3"), "env SKYPILOT_NODE_RANK follows from the job"),
    ],
)
def test_wrong_options_are_one_line(target: str, more: tuple[str, ...], said: str) -> None:
    assert said in refusal("train", *LARGE, *on(target, "out=-", *more))


def test_wrong_jobs_are_one_line(tmp_path: Path) -> None:
    def refused(*more: str, target: str = "kubernetes") -> str:
        queue = ["queue=q"] if target == "kubernetes" else []
        return refusal("train", *LARGE, *more, *on(target, "runs=a", *queue))

    assert "--data[0]: 'shards/x' is in no volume of the nodes" in refused("--data", "shards/x")
    assert "'/data/x' is in no volume of the nodes; name it below /runs" in refused("--data", "/data/x")
    assert "--run-folder: '/home/me/run' is not in the volume of the runs" in refused("--run-folder", "/home/me/run")
    assert "'/runs/../x' is not in the volume" in refused("--run-folder", "/runs/../x")
    assert "--rehearse" in refused("--rehearse", "2")
    assert "--debug: is not for --on kubernetes" in refused("--debug")
    assert "run.checkpoints.memory" in refused("--set", "run.checkpoints.memory=2")
    served = "run.logging.metrics_port: is served by `shardwise train`, and {} starts these"
    for target in ("kubernetes", "skypilot"):
        assert served.format(target) in refused("--set", "run.logging.metrics_port=9100", target=target)
    nowhere = on("kubernetes", "runs=a", "queue=q", f"out={tmp_path}/none/x.yaml")
    assert "x.yaml cannot be written" in refusal("train", *LARGE, *nowhere)
    assert "--json: cannot be combined with out=-" in refusal("train", *LARGE, "--json", *on("kubernetes", "out=-"))
    assert "kubernetes only writes a file for `train`" in refusal("verify", *LARGE[:-4], "--on", "kubernetes")
    gaudi = ("--model", "llama3-8b", "--cluster", "mi355x-node:2", "--tp", "8", "--seq", "4096", "--global-batch", "64")
    unknown = refusal("train", *gaudi, *on("skypilot", "runs=a"))
    assert "SkyPilot's name of mi355x is not known; give it: --on skypilot,accelerator=NAME" in unknown


def test_every_option_is_tried() -> None:
    """Options that are mutually exclusive are in separate cases."""
    for target, given in EVERYTHING.items():
        tried = {one.partition("=")[0] for one in given}
        assert set(TARGETS[target].options) - tried == ({"kind", "gang", "out"} if target == "kubernetes" else {"out"})


def test_names_are_made_for_the_cluster() -> None:
    for text in ("My Run_7B.v2", "70b", "Ünïcode", "---", "x" * 99, "a--b-"):
        assert is_name(name_from(text)), text
    assert name_from("My Run_7B.v2") == "my-run-7b-v2"


def test_the_file_and_how_to_submit_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = shardwise("train", *LARGE, *on("skypilot", "runs=a"))
    said = "llama3-8b.skypilot.yaml\nSubmit it: sky jobs launch llama3-8b.skypilot.yaml\n"
    assert (found.status, found.out) == (0, said)
    found = shardwise("train", *LARGE, "--json", *on("kubernetes", "runs=a", "gang=none"))
    assert json.loads(found.out) == {
        "format": 1,
        "path": "llama3-8b.kubernetes.yaml",
        "command": ["kubectl", "apply", "-f", "llama3-8b.kubernetes.yaml"],
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "llama3-8b.kubernetes.yaml", "llama3-8b.skypilot.yaml"
    ]  # fmt: skip


# -- what they run -----------------------------------------------------------------------------------------


def environment(folder: Path) -> dict[str, str]:
    """In which the image's command is found."""
    executable = folder / "bin" / "shardwise"
    executable.parent.mkdir()
    executable.write_text(f'#!/bin/sh\nexec {sys.executable} -m shardwise "$@"\n')
    executable.chmod(0o755)
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return {**own, "PATH": f"{executable.parent}{os.pathsep}{own['PATH']}"}


class Pods:
    """The nodes of a manifest as processes of this machine: its command and variables, with folders of ``folder``."""

    def __init__(self, folder: Path, *job: str) -> None:
        (folder / "cluster").mkdir()
        given = (*SMALL, "--cluster", two_nodes(folder / "cluster"), *job)
        text = shardwise("train", *given, *on("kubernetes", "out=-", "runs=a", "queue=q", "kind=jobset"))
        assert text.status == 0, text.err
        here = re.sub("(?<!/)/runs/", f"{folder}/runs/", text.out).replace("/etc/shardwise", str(folder))
        self.documents = list(yaml.safe_load_all(here))
        (folder / "job.yaml").write_text(by_kind(self.documents)["ConfigMap"]["data"]["job.yaml"])
        self.run = folder / "runs" / "tiny"
        self._own = environment(folder)

    def start(self, *around: str) -> list[subprocess.Popen[str]]:
        """The command of every pod, ``around`` which may be another."""
        container, port = pod(self.documents)["containers"][0], free_port()
        started = []
        for number in range(2):
            given = {one["name"]: one.get("value", str(number)) for one in container["env"]}
            given |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
            started.append(
                subprocess.Popen(
                    [*around, *container["command"]], env={**self._own, **given}, text=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        return started


def ended(pods: list[subprocess.Popen[str]]) -> tuple[list[int], list[tuple[str, str]]]:
    try:
        said = [one.communicate(timeout=600) for one in pods]
    finally:
        for one in pods:
            one.kill()
    return [one.returncode for one in pods], said


@pytest.mark.slow
def test_pods_train_are_evicted_and_end_as_plain_train(tmp_path: Path) -> None:
    from launch.ray.test_ray import equal_weights

    job = ("--steps", "40", "--set", "run.checkpoints.steps=100", "--set", "run.data.workers=1")
    here = shardwise("train", *SMALL, "--cluster", "laptop:2", "--run-folder", str(tmp_path / "here"), *job)
    assert here.status == 0, here.err
    pods = Pods(tmp_path, *job)
    started = pods.start()
    metrics = pods.run / "metrics.jsonl"
    while not (metrics.exists() and '"step": 3' in metrics.read_text()):
        assert {one.poll() for one in started} == {None}, ended(started)  # a run that waits too long ends by itself
        time.sleep(0.02)
    started[1].terminate()  # as Kubernetes evicts one pod
    statuses, said = ended(started)
    assert statuses[1] == 76, said  # it has saved, and is not done: Kubernetes must start all again
    done = len(losses(pods.run))
    assert 0 < done < 40 and len(list((pods.run / "checkpoints").glob("step-*"))) == 1
    statuses, said = ended(pods.start())
    assert statuses == [0, 0], said
    assert losses(pods.run) == losses(tmp_path / "here")
    equal_weights(pods.run, tmp_path / "here")


@pytest.mark.slow
def test_a_mistake_ends_all_pods_with_the_status_that_is_final(tmp_path: Path) -> None:
    pods = Pods(tmp_path, "--steps", "4")
    job = tmp_path / "job.yaml"
    job.write_text(job.read_text() + "  start_from: /nowhere\n")
    statuses, said = ended(pods.start())
    assert statuses == [2, 2], said
    assert "run.start_from" in said[0][1] + said[0][0]


@pytest.mark.slow
def test_nodes_that_share_only_a_store_lose_their_disks_and_resume(tmp_path: Path) -> None:
    from launch.ray.test_ray import equal_weights
    from run.storage.object_store import object_server
    from run.storage.test_storage import remote

    (tmp_path / "runs").mkdir()
    own_disk = ("unshare", "--mount", "bash", "-c", f'mount -t tmpfs own {tmp_path}/runs && exec "$@"', "--")
    tried = subprocess.run([*own_disk, "true"], capture_output=True, text=True)
    require("emulate", None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}")
    steps = ("--steps", "4", "--set", "run.data.workers=1")
    here = shardwise("train", *SMALL, "--cluster", "laptop:2", "--run-folder", str(tmp_path / "here"), *steps)
    assert here.status == 0, here.err
    with object_server() as server:
        place = remote(server.uri("pods"))
        pods = Pods(tmp_path, *steps, "--set", f"run.checkpoints.folder={place}", "--set", "run.stop_at=2")
        statuses, said = ended(pods.start(*own_disk))
        assert statuses == [0, 0], said
        assert not list((tmp_path / "runs").iterdir())  # what each had of its own is gone
        job = tmp_path / "job.yaml"
        job.write_text(job.read_text().replace("stop_at: 2", "stop_at: 4"))
        statuses, said = ended(pods.start(*own_disk))
        assert statuses == [0, 0], said
        for name in place.objects():
            copy = tmp_path / "copy" / "checkpoints" / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((place / name).read_bytes())
    assert sorted(path.name for path in (tmp_path / "copy" / "checkpoints").glob("step-*")) == [
        "step-00000002", "step-00000004"  # the second start resumed
    ]  # fmt: skip
    for one in (tmp_path / "copy").rglob("*.safetensors"):  # files in a store have names of their own
        one.rename(one.with_name(re.sub(r"\..*\.", ".", one.name)))
    equal_weights(tmp_path / "copy", tmp_path / "here")


@pytest.mark.slow
def test_nodes_of_skypilot_train_as_plain_train(tmp_path: Path) -> None:
    from launch.ray.test_ray import equal_weights

    job = ("--steps", "3", "--set", "run.data.workers=1")
    here = shardwise("train", *SMALL, "--cluster", "laptop:2", "--run-folder", str(tmp_path / "here"), *job)
    assert here.status == 0, here.err
    (tmp_path / "cluster").mkdir()
    (task,) = rendered("skypilot", (*SMALL, "--cluster", two_nodes(tmp_path / "cluster"), *job), "runs=a")
    own = environment(tmp_path)
    sky = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_NUM_GPUS_PER_NODE": "0"}
    sky["SKYPILOT_TASK_ID"] = str(tmp_path)
    started = []
    for node in range(2):
        script = f"{task['setup']}{task['run']}".replace("/tmp/shardwise", f"{tmp_path}/node-{node}")
        command = ["bash", "-c", script.replace("/runs/", f"{tmp_path}/runs/")]
        given = {**own, **sky, "SKYPILOT_NODE_RANK": str(node)}
        started.append(subprocess.Popen(command, env=given, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    statuses, said = ended(started)
    assert statuses == [0, 0], said
    assert losses(tmp_path / "runs" / "tiny") == losses(tmp_path / "here")
    equal_weights(tmp_path / "runs" / "tiny", tmp_path / "here")
