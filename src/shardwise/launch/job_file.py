"""The job of a run as its processes read it: its file, written again for every layout, and its nodes in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.planner.candidate import Candidate, candidate
from shardwise.planner.placement import WORTHWHILE, place_nodes, placement_words
from shardwise.run.checkpoint.folder import RunFolder
from shardwise.run.metrics.recorder import write_prediction
from shardwise.spec.job import Job


def write_job(job: Job, folder: RunFolder, price: Candidate | None = None) -> None:
    """Replaces the job file atomically; ``price`` is computed unless it is given."""
    temporary = folder.job.with_suffix(".part")
    temporary.write_text(job.to_yaml(), encoding="utf-8")
    temporary.replace(folder.job)
    memory = (price := price or candidate(job)).memory
    # What a run measures is its tensors, without the framework's own memory.
    write_prediction(folder.path, price.step_seconds, memory.total - memory.allowance)


# -- The order of a run's nodes --------------------------------------------------------------------


def on_nodes(job: Job, hosts: Sequence[str] | None, *, started: bool) -> tuple[Job, list[str]]:
    """The job with its wiring in the order of the ranks, and notes; a job without a wiring is returned unchanged.

    The order is the one predicted to be fastest, or the given one with a note on what that costs.
    ``hosts`` are those that a target names, in its order; None for virtual nodes, which stand for those of the wiring,
    or if a manager chooses the hosts later. ``started`` says that ranks run there already and cannot be reordered.
    """
    wiring = job.cluster.wiring
    if wiring is None or (hosts is None and job.run.emulate is None):
        return job, []
    named = wiring.hosts[: job.cluster.nodes] if hosts is None else tuple(hosts)
    unknown = [host for host in named if host not in wiring.hosts]
    if unknown or len(named) < job.cluster.nodes:
        why = f"it does not know {unknown[0]}" if unknown else f"it names {len(named)} of {job.cluster.nodes} nodes"
        return replace(job, cluster=replace(job.cluster, wiring=None)), [f"cluster.wiring is not used: {why}"]
    as_given = replace(job, cluster=replace(job.cluster, wiring=wiring.of(named)))
    placement = place_nodes(job, named)
    words = None if placement is None else placement_words(placement)
    if placement is None or words is None:
        return as_given, []
    if not started and job.run.reorder:
        return placement.job, [f"ranks go to the nodes in another order: {words}"]
    if placement.gain < WORTHWHILE:
        return as_given, []
    remedy = "start the ranks on the hosts in that order" if started else "run.reorder: true does it"
    return as_given, [f"the nodes are not in their best order, {words}; {remedy}"]
