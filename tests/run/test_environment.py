"""A process finds its place by the variables of whichever launcher started it, or says in a line what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.interop.fabric import nodes_of, tasks_of_nodes
from shardwise.run.environment import Started, StartedNode, started, started_node
from shardwise.spec import SpecError

Environment = dict[str, str]


def torchrun(rank: int, world: int, here: int) -> Environment:
    elastic = {"GROUP_WORLD_SIZE": str(world // here), "TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": str(rank % here)}
    own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here)}
    return {**own, **elastic, "MASTER_ADDR": "n0", "MASTER_PORT": "29400"}


def open_mpi(rank: int, world: int, here: int) -> Environment:
    name = "OMPI_COMM_WORLD"
    places = {f"{name}_RANK": rank, f"{name}_SIZE": world, f"{name}_LOCAL_RANK": rank % here, "PMIX_RANK": rank}
    return {key: str(one) for key, one in {**places, f"{name}_LOCAL_SIZE": here, "PMIX_NAMESPACE": 77}.items()}


def mpich(rank: int, world: int, here: int) -> Environment:
    places = {"PMI_RANK": rank, "PMI_SIZE": world, "MPI_LOCALRANKID": rank % here, "MPI_LOCALNRANKS": here}
    return {key: str(one) for key, one in places.items()}


def slurm(rank: int, world: int, here: int) -> Environment:
    hosts = world // here
    step = {
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_STEP_TASKS_PER_NODE": f"{here}(x{hosts})" if hosts > 1 else str(here),
    }
    step |= {"SLURM_STEP_NODELIST": f"n[0-{hosts - 1}]" if hosts > 1 else "n0", "SLURM_STEP_ID": "0"}
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank % here),
        "SLURM_JOB_ID": "41",
        **step,
        "SLURM_NTASKS": str(world),
    }


LAUNCHERS: list[Callable[[int, int, int], Environment]] = [torchrun, open_mpi, mpich, slurm]
REACHABLE = {"MASTER_ADDR": "n0", "MASTER_PORT": "29400"}  # what MPI launchers do not say
worlds = st.tuples(st.integers(1, 9), st.integers(1, 9)).filter(lambda pair: pair[0] * pair[1] > 1)


@given(worlds, st.data(), st.sampled_from(LAUNCHERS))
def test_every_launcher_says_the_same_place(shape: tuple[int, int], data: st.DataObject, launcher) -> None:
    hosts, here = shape
    rank = data.draw(st.integers(0, hosts * here - 1))
    found = started({**launcher(rank, hosts * here, here), **REACHABLE})
    assert found == Started(rank, hosts * here, here, "n0", 29400)
    assert found is not None and (found.hosts, found.local_rank) == (hosts, rank % here)


@given(worlds, st.data(), st.permutations(LAUNCHERS))
def test_launchers_that_agree_are_one(shape: tuple[int, int], data: st.DataObject, order) -> None:
    hosts, here = shape
    rank = data.draw(st.integers(0, hosts * here - 1))
    environment: Environment = {}
    for launcher in order[: data.draw(st.integers(1, 4))]:
        environment |= launcher(rank, hosts * here, here)
    assert started({**environment, **REACHABLE}) == Started(rank, hosts * here, here, "n0", 29400)


@given(st.integers(0, 3), st.integers(0, 3), st.permutations(LAUNCHERS))
def test_launchers_that_disagree_are_both_named(one: int, other: int, order) -> None:
    first, second = order[:2]
    environment = {**first(one, 4, 4), **second(other, 4, 4), **REACHABLE}
    if one == other:
        assert started(environment) == Started(one, 4, 4, "n0", 29400)
        return
    with pytest.raises(SpecError) as error:
        started(environment)
    assert str(error.value).startswith("rank: ") and str(error.value).count(" says ") == 2
    assert f"says {one} (" in str(error.value) and f"says {other} (" in str(error.value)


@given(worlds, st.data())
def test_one_agent_per_node_is_no_contradiction(shape: tuple[int, int], data: st.DataObject) -> None:
    """srun starts torchrun, or mpirun its daemons, once on every node; torchrun may number the nodes otherwise."""
    hosts, here = shape
    rank, node = data.draw(st.integers(0, hosts * here - 1)), data.draw(st.integers(0, hosts - 1))
    inner = data.draw(st.sampled_from(LAUNCHERS[:3]))
    outer = slurm(node, hosts, 1) | {"PMIX_RANK": str(node)} if inner is torchrun else slurm(node, hosts, 1)
    assert started({**outer, **inner(rank, hosts * here, here), **REACHABLE}) == Started(
        rank, hosts * here, here, "n0", 29400
    )


def test_what_a_launcher_leaves_out_is_derived() -> None:
    under_slurm = started(slurm(3, 4, 2))
    assert under_slurm is not None and under_slurm.address == "n0" and 20_000 <= (under_slurm.port or 0) < 30_000
    again = slurm(3, 4, 2) | {"SLURM_RESTART_COUNT": "1"}  # a socket of the last attempt may linger
    assert started(again) != under_slurm
    assert started(slurm(3, 4, 2) | {"SLURM_STEP_ID": "1"}) != under_slurm
    one_host, other = started(open_mpi(1, 4, 4)), started(open_mpi(1, 4, 4) | {"PMIX_NAMESPACE": "78"})
    assert one_host is not None and one_host.address == "127.0.0.1" and one_host != other
    ports = {started(mpich(rank, 4, 4)).port for rank in range(4)}  # type: ignore[union-attr]
    assert len(ports) == 1  # by the process that started all of them
    in_allocation = started(mpich(1, 4, 2) | {"SLURM_JOB_NODELIST": "gpu-[07-08]", "SLURM_JOB_ID": "9"})
    assert in_allocation is not None and in_allocation.address == "gpu-07"
    with pytest.raises(SpecError, match=r"MASTER_ADDR: is not set, and Open MPI .*; mpirun -x MASTER_ADDR=\.\.\."):
        started(open_mpi(1, 4, 2))


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[0-1]"},  # the shell of an salloc
        {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a batch script
        slurm(0, 4, 2) | {"SLURM_STEP_ID": str(0xFFFFFFFA)},  # salloc with an interactive step
        slurm(0, 4, 2) | {"SLURM_STEP_ID": str(0xFFFFFFFB)},  # a batch script of a newer Slurm
        slurm(0, 1, 1),  # srun -n 1, srun --pty bash
        slurm(0, 1, 1) | {"PMIX_RANK": "0"},  # the same with --mpi=pmix
        slurm(0, 1, 1) | {"PMI_RANK": "0", "PMI_SIZE": "1"},  # and with --mpi=pmi2
        open_mpi(0, 1, 1),
        mpich(0, 1, 1),
        {"MASTER_ADDR": "n0", "MASTER_PORT": "29400"},  # exported in a profile
        {"PMIX_RANK": "0"},
    ],
    ids=str,
)
def test_who_is_no_rank(environment: Environment) -> None:
    assert started(environment) is None
    assert started_node(environment) is None


def test_a_worker_is_a_rank_even_alone() -> None:
    assert started(slurm(0, 1, 1), always=True) is not None
    assert started(torchrun(0, 1, 1)) == Started(0, 1, 1, "n0", 29400)  # which nobody starts by accident


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            open_mpi(1, 2, 2) | {"SLURM_NTASKS": "4", "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_ID": "3"},
            "world: Open MPI says 2 (OMPI_COMM_WORLD_SIZE), the allocation 4 (SLURM_NTASKS); "
            "start 4 ranks, or unset SLURM_NTASKS",
        ),
        (
            mpich(1, 2, 2) | slurm(1, 4, 4),
            "world: PMI (MPICH, Intel MPI, Cray) says 2 (PMI_SIZE), Slurm says 4 (SLURM_STEP_NUM_TASKS); "
            "start it by one of them",
        ),
        (
            slurm(1, 4, 4) | {"WORLD_SIZE": "8"},
            "world: Slurm says 4 (SLURM_STEP_NUM_TASKS), torchrun says 8 (WORLD_SIZE); start it by one of them",
        ),
        (
            torchrun(1, 4, 4) | {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            "nodes: torchrun says 1, Kubeflow says 2 (PET_NNODES); start it on all of them, or unset PET_NNODES",
        ),
        (slurm(1, 4, 4) | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}, "nodes have different numbers of tasks"),
        (slurm(1, 4, 2) | {"SLURM_LOCALID": "0"}, "rank 1 is number 1 of 2 on its host; number the ranks host by host"),
        ({"PMIX_RANK": "3"}, "WORLD_SIZE: is not set, and PMIx does not say it"),
        (torchrun(1, 4, 4) | {"MASTER_PORT": "0"}, "MASTER_PORT: 0 is not a port; use 1 to 65535"),
        (slurm(1, 4, 2) | {"SLURM_STEP_NODELIST": "n[0-"}, "'n[0-' is not a list of nodes"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_is_refused(environment: Environment, said: str) -> None:
    with pytest.raises(SpecError) as error:
        started(environment)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_an_allocation_of_one_task_per_node_only_reserves_nodes() -> None:
    nodes = {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[0-1]"}
    assert started(open_mpi(1, 16, 8) | nodes) is not None
    assert started(torchrun(1, 2, 2) | {"SLURM_NTASKS": "16", "SLURM_JOB_NUM_NODES": "1"}) is not None


def test_our_own_launcher_is_inside_of_any_other() -> None:
    own = {"SHARDWISE_LAUNCHER": "7", "SHARDWISE_RENDEZVOUS": "/x", "RANK": "1", "WORLD_SIZE": "2"}
    inside = slurm(0, 4, 4) | own | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert started(inside, always=True) == Started(1, 2, 2)
    assert started(inside) is None, "a command that is typed there is no rank"


def test_a_node_among_nodes() -> None:
    kubeflow = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "job-0"}
    assert started_node(kubeflow | {"PET_MASTER_PORT": "29500"}) == StartedNode(1, 2, 8, "job-0", 29500)
    found = started_node({**kubeflow, "PET_NPROC_PER_NODE": "auto", "PET_MASTER_PORT": "29500"})
    assert found == StartedNode(1, 2, None, "job-0", 29500)
    assert started_node(kubeflow | {"PET_NNODES": "1"}) is None
    assert started_node(kubeflow | torchrun(9, 16, 8)) is None
    sky = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    found = started_node(sky | {"SKYPILOT_NUM_GPUS_PER_NODE": "4", "SKYPILOT_TASK_ID": "sky-1"})
    assert found is not None and (found.ranks_here, found.address) == (4, "10.0.0.1")
    assert started_node(sky | {"SKYPILOT_NUM_GPUS_PER_NODE": "0"}).ranks_here is None  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="SKYPILOT_NODE_RANK: 2 of 2 nodes"):
        started_node(sky | {"SKYPILOT_NODE_RANK": "2"})


# -- node lists --------------------------------------------------------------------------------------------

names = st.lists(
    st.from_regex(r"[a-z][a-z-]{0,4}", fullmatch=True).map(lambda name: f"{name}x"), min_size=1, max_size=4
)


@given(names, st.integers(0, 120), st.integers(0, 12), st.integers(1, 4))
def test_a_range_is_its_numbers(prefixes: list[str], first: int, more: int, width: int) -> None:
    numbers = [str(number).zfill(width) for number in range(first, first + more + 1)]
    text = ",".join(f"{prefix}[{numbers[0]}-{first + more:0{width}d}]" for prefix in prefixes)
    assert nodes_of(text) == [prefix + number for prefix in prefixes for number in numbers]


@given(st.text(alphabet="an0129[]-, ", max_size=14))
def test_any_other_text_is_refused_in_one_line(text: str) -> None:
    try:
        found = nodes_of(text)
    except SpecError as error:
        assert "\n" not in str(error)
    else:
        assert found and all(name and not set(name) & set("[], ") for name in found)


def test_lists_as_slurm_writes_them() -> None:
    assert nodes_of("n[01-03,7],gpu-a") == ["n01", "n02", "n03", "n7", "gpu-a"]
    assert nodes_of("r[1-2]n[08-09].x") == ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]
    assert nodes_of("n[09-11]") == ["n09", "n10", "n11"]
    assert tasks_of_nodes("2(x3),1") == [2, 2, 2, 1]
    for wrong in ("", "n[1-", "n[2-1]", "n[a]", "n]1[", "n[1[2]]", "a,,b", "n[0-9999999]"):
        with pytest.raises(SpecError, match="is not a list of nodes"):
            nodes_of(wrong)


THERE = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "host-0", "MASTER_PORT": "29400"}


def test_a_place_among_hosts() -> None:
    assert started({}) is None
    here = started(THERE)
    assert here == Started(5, 8, 4, "host-0", 29400)
    assert here is not None and here.hosts == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"RANK": None}, "RANK: is not set; start all ranks by torchrun, srun or mpirun"),
        ({"RANK": "first"}, "RANK: 'first' is not a number"),
        ({"RANK": "8"}, "RANK: 8 of a world of 8"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE: is not set"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE: 8 ranks do not fill hosts of 3"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: 8 ranks do not fill hosts of 0"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR: is not set"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: 'http' is not a number"),
    ],
    ids=str,
)
def test_what_is_missing_is_named(change: dict[str, str | None], said: str) -> None:
    with pytest.raises(SpecError) as error:
        started({name: value for name, value in {**THERE, **change}.items() if value is not None})
    assert said in str(error.value)
