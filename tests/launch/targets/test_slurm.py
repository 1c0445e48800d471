"""`--on slurm`: the script says what the job needs; a real Slurm with two nodes runs, signals and requeues it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from cli.running import run as shardwise
from launch.running import wait_until
from launch.targets.slurm_cluster import node_names, slurm_cluster
from launch.targets.test_hosts import refusal
from shardwise.launch.targets.slurm import in_order, script
from shardwise.spec.clusters import cpu_hosts
from shardwise.spec.files import dump_yaml
from shardwise.spec.job import Job
from shardwise.spec.wiring import PairLink, Wiring

SMALL = ("--model", "tiny", "--seq", "32", "--global-batch", "4", "--precision", "fp32", "--dp", "2")


def job(cluster: object, **strategy: int) -> Job:
    training = {"global_batch": 32, "seq": 64}
    return Job.from_dict({"model": "tiny", "cluster": cluster, "strategy": strategy, "training": training})


def directives(text: str) -> dict[str, str | None]:
    lines = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    return {name: value or None for name, value in lines}


def test_the_script_says_what_the_job_needs(tmp_path: Path) -> None:
    more = {"partition": "gpu", "exclusive": "", "time": "4:00:00"}
    text = script(job("dgx-h100:2"), tmp_path / "my run", grace_seconds=60, sbatch=more)
    assert directives(text) == {
        "job-name": "my-run", "nodes": "2", "ntasks": "16", "ntasks-per-node": "8", "gpus-per-node": "8",
        "requeue": None, "open-mode": "append", "output": f"{tmp_path}/my run/slurm-%j.log", "signal": "B:USR1@120",
        "partition": "gpu", "exclusive": None, "time": "4:00:00",
    }  # fmt: skip
    assert f"run='{tmp_path}/my run'" in text and sys.executable in text
    assert not re.search(r"@\w+@", text)
    assert "gpus-per-node" not in script(job("laptop:2"), tmp_path, grace_seconds=30)
    if shutil.which("bash"):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("nodes=4", "--on: nodes follows from the job; leave it out"),
        ("--nodes=4", "--on: nodes follows from the job; leave it out"),
        ("partiton=gpu", "--on: 'partiton' is not an option of slurm; did you mean partition?"),
        ("address=1", "'address' is not an option of slurm; it is for --on ray"),
        ("time=1\n#SBATCH --nodes=9", "time is an option of sbatch, such as time=4:00:00"),
        ("time=", "time is an option of sbatch, such as time=4:00:00"),
        ("submit=yes", "submit is a switch"),
        ("submit,submit", "submit is given twice"),
        ('comment="a', "no closing quotation"),
    ],
)
def test_options_that_are_refused(option: str, said: str) -> None:
    assert said in refusal("train", *SMALL, "--cluster", "laptop:2", "--on", f"slurm,{option}")


def test_train_writes_it_and_starts_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = ("train", *SMALL, "--cluster", "laptop:2", "--run-folder", str(folder), "--on", "slurm")
    found = shardwise(*given[:-1], "slurm,hold,comment=a\\, b,--bank=ml")
    assert (found.status, found.out) == (0, f"{folder}/slurm.sh\nSubmit it: sbatch {folder}/slurm.sh\n")
    more = directives((folder / "slurm.sh").read_text())
    assert (more["hold"], more["comment"], more["bank"]) == (None, "a, b", "ml")
    assert (folder / "job.yaml").exists() and not (folder / "attempts").exists()
    assert "TORCH_DISTRIBUTED_DEBUG" not in (folder / "slurm.sh").read_text()
    said = json.loads(shardwise(*given, "--json", "--debug").out)
    assert said == {"format": 1, "path": f"{folder}/slurm.sh", "command": ["sbatch", f"{folder}/slurm.sh"]}
    assert "export TORCH_DISTRIBUTED_DEBUG=DETAIL\n" in (folder / "slurm.sh").read_text()
    assert "--csv: is not for --on slurm without submit" in refusal(*given, "--csv")


# -- the order of the nodes ----------------------------------------------------------------------------------

NODES = ("n1", "n2", "n3", "n4")


def far_apart() -> dict[str, tuple[str, ...]]:
    """Every second node is below another switch."""
    return {name: (f"leaf{number % 2}", "spine") for number, name in enumerate(NODES)}


def cpu_job(wiring: Wiring | None = None, reorder: bool = True, **strategy: int) -> Job:
    found = job(replace(cpu_hosts(4, 1), wiring=wiring), **strategy)
    return replace(found, run=replace(found.run, reorder=reorder))


def test_a_wiring_orders_the_nodes_that_slurm_chose_and_keeps_what_it_knows_of_others() -> None:
    slow = PairLink(between=("n2", "n3"), bandwidth=1e6, latency=1e-3)
    known = Wiring(hosts=("n0", *NODES), links=(slow,))
    found, order, notes = in_order(cpu_job(known, dp=4), NODES, lambda: pytest.fail("Slurm is asked"))
    assert order == ("n1", "n2", "n4", "n3") and "in another order" in notes[0]
    assert found.cluster.wiring == replace(known, hosts=(*order, "n0"))
    assert in_order(found, NODES, dict)[1] == order  # after a requeue
    kept = in_order(cpu_job(known, reorder=False, dp=4), NODES, dict)
    assert kept[1] == NODES and kept[2][0].endswith("run.reorder: true does it")


def test_switches_of_slurm_order_nodes_that_no_wiring_knows() -> None:
    found, order, notes = in_order(cpu_job(pp=4), NODES, far_apart)
    assert found.cluster.wiring is not None and found.cluster.wiring.hosts == order
    assert sum(far_apart()[one] != far_apart()[other] for one, other in pairwise(NODES)) == 3
    assert sum(far_apart()[one] != far_apart()[other] for one, other in pairwise((*order, order[0]))) == 2
    elsewhere = cpu_job(Wiring(hosts=("a", "b", "c", "d")), pp=4)
    unknown = "cluster.wiring is not used: it does not know n1"
    assert in_order(elsewhere, NODES, far_apart)[1:] == (order, [unknown, *notes])
    plain = cpu_job(pp=4)
    assert in_order(plain, NODES, dict) == (plain, NODES, [])


# -- a real Slurm ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        yield {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def two_nodes(folder: Path) -> str:
    """A cluster file of two hosts with a core each."""
    path = folder / "cluster.yaml"
    path.write_text(dump_yaml(cpu_hosts(2, 1).to_dict()))
    return str(path)


def train(slurm: dict[str, str], folder: Path, *more: str) -> subprocess.Popen[str]:
    """`shardwise train --on slurm,submit` on both nodes."""
    command = [sys.executable, "-m", "shardwise", "train", *SMALL, "--cluster", two_nodes(folder)]
    command += ["--run-folder", str(folder / "run"), "--on", "slurm,submit", *more]
    return subprocess.Popen(command, env=slurm, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def control(slurm: dict[str, str], *command: str) -> str:
    done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    return done.stdout


def job_number(slurm: dict[str, str]) -> str:
    wait_until(lambda: bool(control(slurm, "squeue", "-h", "-o", "%i").strip()))
    return control(slurm, "squeue", "-h", "-o", "%i").split()[0]


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line.get("loss") is not None}


@pytest.mark.slow
def test_a_job_is_signalled_and_requeued_and_ends_as_one_that_was_not(slurm: dict[str, str], tmp_path: Path) -> None:
    steps = ("--steps", "30", "--set", "run.checkpoints.steps=50", "--set", "run.logging.memory=1000")
    here = shardwise("train", *SMALL, "--cluster", "laptop:2", "--run-folder", str(tmp_path / "here"), *steps)
    assert here.status == 0, here.err
    following = train(slurm, tmp_path, *steps, "--set", "run.data.workers=1")
    try:
        number, run = job_number(slurm), tmp_path / "run"
        metrics = run / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"step": 3' in metrics.read_text(), 200)
        control(slurm, "scancel", "--batch", "--signal=USR1", number)  # what Slurm does before the time limit
        start_again(slurm, number, 1)
        assert len(list((run / "checkpoints").glob("step-*"))) == 1  # by the signal
        done = len(losses(run))
        wait_until(lambda: len(losses(run)) > done + 2, 200)
        control(slurm, "scontrol", "requeue", number)
        start_again(slurm, number, 2)
        out, err = following.communicate(timeout=300)
        assert following.returncode == 0, (out, err, (run / f"slurm-{number}.log").read_text())
    finally:
        following.kill()
    assert losses(run) == losses(tmp_path / "here")
    assert f"submitted: job {number}" in err and "Done: " in out
    nodes = {line for line in (run / f"slurm-{number}.log").read_text().splitlines() if "requeued" in line}
    assert nodes, "the script said that it was stopped before the limit"


def start_again(slurm: dict[str, str], number: str, count: int) -> None:
    """Once the job is in the queue again, where Slurm would keep it for two minutes."""
    wait_until(lambda: restarts(slurm, number) == count and "JobState=PENDING" in control(
        slurm, "scontrol", "show", "job", number), 100)  # fmt: skip
    time.sleep(3)  # its old credential is revoked to the second
    control(slurm, "scontrol", "update", f"jobid={number}", "StartTime=now")


def restarts(slurm: dict[str, str], number: str) -> int:
    found = re.search(r"Restarts=(\d+)", control(slurm, "scontrol", "show", "job", number))
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_srun_starts_ranks_of_any_verb_and_one_task_is_no_rank(slurm: dict[str, str], tmp_path: Path) -> None:
    verify = [sys.executable, "-m", "shardwise", "verify", *SMALL, "--cluster", two_nodes(tmp_path), "--steps", "1"]
    done = subprocess.run([*verify, "--on", "slurm", "--json"], env=slurm, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["ok"], done
    alone = subprocess.run(["srun", "-n1", *verify], env=slurm, capture_output=True, text=True, timeout=300)
    assert alone.returncode == 0, alone  # which starts its own processes


WHO = """import os
if "SLURM_STEP_NUM_TASKS" in os.environ:
    with open({file!r}, "a") as file:
        print(os.environ["SLURM_PROCID"], os.environ["SLURMD_NODENAME"], file=file)
"""


@pytest.mark.slow
def test_ranks_are_on_the_nodes_in_the_order_of_the_wiring(tmp_path: Path) -> None:
    """A pipeline over three nodes, of which the first two are far from each other: the third goes between them."""
    first, second, third = node_names(3)
    slow = PairLink(between=(first, second), bandwidth=1e6, latency=1e-3)
    cluster = replace(cpu_hosts(3, 1), wiring=Wiring(hosts=(first, second, third), links=(slow,)))
    described, seen, code = tmp_path / "cluster.yaml", tmp_path / "seen", tmp_path / "code"
    described.write_text(dump_yaml(cluster.to_dict()))
    code.mkdir()
    (code / "sitecustomize.py").write_text(WHO.format(file=str(seen)))
    given = (*SMALL[:-2], "--pp", "3", "--set", "strategy.stage_layers=balanced", "--steps", "2")
    command = [sys.executable, "-m", "shardwise", "train", *given, "--cluster", str(described)]
    command += ["--run-folder", str(tmp_path / "run"), "--on", "slurm,submit"]
    with slurm_cluster(tmp_path / "slurm", 3) as environment:
        path = os.pathsep.join([str(code), *sys.path])
        own = {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    (log,) = (tmp_path / "run").glob("slurm-*.log")
    assert done.returncode == 0, (done, log.read_text())
    ranks = dict(line.split() for line in seen.read_text().splitlines())
    assert [ranks[str(rank)] for rank in range(3)] in ([first, third, second], [second, third, first])
    assert "ranks go to the nodes in another order" in log.read_text()
