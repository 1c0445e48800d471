"""The commands for several hosts, as torchrun itself reads them."""

from __future__ import annotations

import shlex

import pytest

from shardwise.launch.torchrun import torchrun_commands
from shardwise.spec import SpecError
from shardwise.spec.job import Job


def job(cluster: str, **strategy: int) -> Job:
    return Job.from_dict(
        {"model": "tiny", "cluster": cluster, "strategy": strategy, "training": {"global_batch": 32, "seq": 64}}
    )


def test_one_command_per_host_that_torchrun_accepts() -> None:
    run = pytest.importorskip("torch.distributed.run")
    commands = torchrun_commands(job("dgx-h100:2"), "my jobs/job.yaml", ["--steps", "3"], hosts=["a", "b"], port=1234)
    assert len(commands) == 2
    for name, command in zip("ab", commands):
        program, *arguments = shlex.split(command)
        parsed = run.parse_args(arguments)
        assert (program, parsed.nnodes, parsed.nproc_per_node, parsed.module) == ("torchrun", "2", "8", True)
        assert (parsed.rdzv_endpoint, parsed.local_addr, parsed.rdzv_backend) == ("a:1234", name, "c10d")
        assert (parsed.training_script, parsed.max_restarts) == ("shardwise.train.worker", 3)
        assert parsed.training_script_args == ["my jobs/job.yaml", "--steps", "3"]


def test_hosts_without_names_and_one_machine() -> None:
    assert [f"--local-addr=host-{n} " in c for n, c in enumerate(torchrun_commands(job("dgx-h100:4"), "j"))] == [
        True
    ] * 4
    (only,) = torchrun_commands(job("laptop:4", tp=2), "job.yaml")
    assert "--nnodes=1 --nproc-per-node=4" in only
    assert "--rdzv-endpoint=localhost:29400" in only


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"hosts": ["a"]}, "hosts: names 1; 16 ranks need 2 of 8 devices"), ({"port": 0}, "port: 0; use 1 to 65535")],
)
def test_what_does_not_fit_the_job(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as error:
        torchrun_commands(job("dgx-h100:2"), "job.yaml", **settings)  # type: ignore[arg-type]
    assert str(error.value) == message
