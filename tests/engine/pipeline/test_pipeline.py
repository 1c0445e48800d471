"""A decoder in stages against one process: loss and every gradient, for every schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cost.builders import job as job_of
from cost.builders import preset
from engine.pipeline import toy_pipeline as toy
from engine.rounding import negligible
from engine.workers import on_ranks
from shardwise.engine.batch import Batch
from shardwise.engine.parameters import HeldPart
from shardwise.engine.pipeline.runtime import Mailbox, Message, PipelineRunner, keep_stage, schedule_of
from shardwise.engine.pipeline.tied import tie_ends
from shardwise.layout.stages import stage_layers, stages_of_rank
from shardwise.measure.reference import deviation, global_norm
from shardwise.models import Decoder, initialise
from shardwise.models.moe import MoELayer
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from shardwise.spec.rules import stage_layer_counts
from shardwise.spec.schedules import job_schedules

SCHEDULES = job_schedules()

RUN = tuple(name for name in SCHEDULES if name != "dualpipe")
SEQUENCE, CPU = 12, torch.device("cpu")
LLAMA = Model(layers=8, hidden=16, heads=4, kv_heads=2, ffn=24, vocab=30, activation="swiglu", norm="rmsnorm",
              norm_bias=False, qk_norm=True)  # fmt: skip
GPT = Model(layers=8, hidden=16, heads=2, ffn=32, vocab=31, positions="learned", tied_embeddings=True, qkv_bias=True,
            attention_out_bias=True, mlp_bias=True, max_seq=16)  # fmt: skip
MODELS = {"llama": LLAMA, "gpt": GPT, "tiny": preset("tiny"), "tiny-moe": preset("tiny-moe")}


def job_for(model: str, pp: int, microbatches: int, schedule: str, **strategy: Any) -> Job:
    more = {"interleave": 2} if schedule == "interleaved" else {}
    training = {"seq": SEQUENCE, "global_batch": 2 * microbatches}
    return job_of(MODELS[model], None, training, pp=pp, dp=1, schedule=schedule, microbatch=2, **more, **strategy)


def batch_for(job: Job, packed: bool = False) -> Batch:
    generator = torch.Generator().manual_seed(3)
    rows = job.sequences
    tokens = torch.randint(job.model.vocab, (rows, SEQUENCE), generator=generator)
    labels = torch.randint(job.model.vocab, (rows, SEQUENCE), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    if not packed:
        return Batch.of(tokens, labels)
    documents = (torch.rand(tokens.shape, generator=generator) < 0.25).long().cumsum(1)
    start = torch.where(documents.diff(dim=1, prepend=documents[:, :1] - 1) > 0, torch.arange(SEQUENCE), 0)
    return Batch.of(tokens, labels, torch.arange(SEQUENCE) - start.cummax(1).values, documents)


def decoder_for(job: Job) -> Decoder:
    decoder = Decoder(job.model)
    for module in decoder.modules():
        if isinstance(module, MoELayer):
            module.balance_scale = module.balance_coefficient / job.sequences
    return decoder


def local_stages(job: Job, rank: int) -> dict[int, nn.Module]:
    layers = stage_layers(job)
    last = len(layers) - 1
    stages: dict[int, nn.Module] = {}
    for index in stages_of_rank(job, rank):
        with torch.device("meta"):
            decoder = keep_stage(decoder_for(job), layers[index], first=index == 0, last=index == last)
        initialise(decoder.to_empty(device="cpu"), 0, job.model)
        stages[index] = decoder
    return stages


def trained(description: str, packed: bool, steps: int) -> dict[str, Any]:
    """Losses and gradients of every step, and the weights at the end, of this rank's stages."""
    job = Job.from_yaml(description)
    group = dist.distributed_c10d._get_default_group()
    schedule, stages = schedule_of(job), local_stages(job, group.rank())
    tied = (
        tie_ends(stages, schedule.placement, dist.get_process_group_ranks(group)) if job.model.tied_embeddings else None
    )
    message = Message((job.strategy.microbatch, SEQUENCE, job.model.hidden), torch.float32, CPU)
    runner = PipelineRunner(schedule, stages, group.rank(), Mailbox(group, message), tied=tied)
    parameters = {f"{index}:{name}": one for index, stage in stages.items() for name, one in stage.named_parameters()}
    optimizer = torch.optim.SGD(set(parameters.values()), lr=0.3, momentum=0.9)
    batch, losses, gradients = batch_for(job, packed), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(runner.step(batch.microbatches(job.microbatches), batch.counted).clone())
        if tied:
            tied.add_gradients()
        gradients.append({name: one.grad.clone() for name, one in parameters.items() if one.grad is not None})
        optimizer.step()
    weights = {name: one.detach() for name, one in parameters.items()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def expected(job: Job, packed: bool, steps: int) -> dict[str, Any]:
    decoder = decoder_for(job)
    initialise(decoder, 0, job.model)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=0.3, momentum=0.9)
    batch, losses, gradients = batch_for(job, packed), [], []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = decoder(batch.tokens, batch.labels, positions=batch.positions, documents=batch.documents) / batch.counted
        loss.backward()
        losses.append(loss.detach())
        gradients.append({name: one.grad.clone() for name, one in decoder.named_parameters() if one.grad is not None})
        optimizer.step()
    return {
        "losses": losses,
        "gradients": gradients,
        "weights": {name: one.detach() for name, one in decoder.named_parameters()},
    }


def plain(name: str, tied: bool) -> str:
    name = name.partition(":")[2]
    return "embedding.weight" if tied and name == "head.weight" else name


def check(job: Job, packed: bool = False, steps: int = 1) -> list[dict[str, Any]]:
    """Every rank's losses, and every parameter of the model on some rank, as one process has them."""
    reference, tied = expected(job, packed, steps), job.model.tied_embeddings
    found = on_ranks(job.strategy.pp, trained, job.to_yaml(), packed, steps)
    for step in range(steps):
        gradients = reference["gradients"][step]
        rounding, norm = negligible(gradients), global_norm(gradients.values())
        seen = set()
        for result in found:
            assert toy.deviation(result["losses"][step], reference["losses"][step]) < 1e-6
            for name, gradient in result["gradients"][step].items():
                seen.add(plain(name, tied))
                compare(plain(name, tied), gradient, gradients, norm if plain(name, tied) in rounding else None)
        assert seen == set(gradients)
    for result in found:
        for name, weight in result["weights"].items():
            compare(plain(name, tied), weight, reference["weights"], norm if plain(name, tied) in rounding else None)
    return found


def compare(name: str, found: Tensor, whole: dict[str, Tensor], scale: float | None) -> None:
    assert deviation(name, found, HeldPart(tuple(found.shape)), whole[name], scale).value < 1e-5, name


@pytest.mark.quick(3)
@pytest.mark.parametrize("schedule", RUN)
def test_two_ranks(schedule: str) -> None:
    check(job_for("llama", 2, 4, schedule))


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_three_steps(schedule: str) -> None:
    check(job_for("tiny", 2, 3, schedule), steps=3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["interleaved", "zb-h1", "dualpipev"])
def test_four_ranks(schedule: str) -> None:
    check(job_for("llama", 4, 4, schedule))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("schedule", "layers"), [("1f1b", (0, 8)), ("zb-2p", (7, 1)), ("zbv", (3, 1, 4, 0))])
def test_stages_of_any_size(schedule: str, layers: tuple[int, ...]) -> None:
    """The ends may hold nothing but the embedding, or the loss."""
    job = job_for("llama", 2, 4, schedule, stage_layers=layers)
    assert tuple(map(len, stage_layers(job))) == layers
    check(job)


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["gpipe", "v-half"])
def test_packed_documents(schedule: str) -> None:
    check(job_for("llama", 2, 3, schedule), packed=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2", "v-min"])
def test_tied_embeddings(schedule: str) -> None:
    """Copies on two ranks see the gradients of both, step by step the same bits; on one rank there is one parameter."""
    job = job_for("gpt", 2, 4, schedule)
    weights = {name: one for result in check(job, steps=3) for name, one in result["weights"].items()}
    head = weights.get(f"{schedule_of(job).stages - 1}:head.weight")
    if schedule == "v-min":
        assert head is None
    else:
        assert head is not None and torch.equal(weights["0:embedding.weight"], head)


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_experts_and_their_balance_loss(schedule: str) -> None:
    check(job_for("tiny-moe", 2, 2, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", RUN)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 6])
def test_few_and_odd_microbatches(schedule: str, microbatches: int) -> None:
    if schedule == "interleaved" and microbatches % 2:
        pytest.skip("interleaving takes multiples of the ranks")
    check(job_for("llama", 2, microbatches, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("schedule", RUN)
@pytest.mark.parametrize(("model", "ranks"), [("llama", 4), ("gpt", 4), ("gpt", 3), ("tiny-moe", 2)])
def test_every_schedule_with_every_model(schedule: str, model: str, ranks: int) -> None:
    check(job_for(model, ranks, 2 * ranks, schedule, stage_layers="balanced"), packed=True, steps=3)


def test_layers_become_stages_as_the_planner_says() -> None:
    even = job_for("llama", 2, 4, "zbv")
    assert stage_layers(even) == (range(2), range(2, 4), range(4, 6), range(6, 8))
    assert [stages_of_rank(even, rank) for rank in (0, 1)] == [(0, 3), (1, 2)]
    assert [stages_of_rank(job_for("llama", 2, 4, "interleaved"), rank) for rank in (0, 1)] == [(0, 2), (1, 3)]
    balanced = job_for("llama", 3, 3, "1f1b", stage_layers="balanced")
    assert tuple(map(len, stage_layers(balanced))) == stage_layer_counts(balanced.model, balanced.strategy) == (3, 3, 2)


def test_a_stage_keeps_its_own_parts() -> None:
    with torch.device("meta"):
        first = keep_stage(Decoder(GPT), range(2), first=True, last=False)
        middle = keep_stage(Decoder(GPT), range(2, 3), first=False, last=False)
        last = keep_stage(Decoder(GPT), range(3, 8), first=False, last=True)
    kept = [{name.split(".")[0] for name, _ in one.named_parameters()} for one in (first, middle, last)]
    assert kept == [{"embedding", "position_embedding", "layers"}, {"layers"}, {"layers", "norm", "head"}]
    assert list(last.layers) == ["3", "4", "5", "6", "7"]


def test_two_copies_are_refused() -> None:
    with pytest.raises(SpecError, match="dualpipev"):
        schedule_of(job_for("llama", 2, 4, "dualpipe"))


def wrong_stages() -> str:
    group = dist.distributed_c10d._get_default_group()
    job = job_for("llama", 2, 4, "1f1b")
    try:
        PipelineRunner(schedule_of(job), {5: nn.Identity()}, group.rank(), Mailbox(group, toy.message()))
    except ValueError as error:
        return str(error)
    return ""


def test_another_ranks_stages_are_refused() -> None:
    assert on_ranks(2, wrong_stages)[1] == "rank 1 holds stages (1,), not (5,)"


def wrong_width() -> str:
    """A stage that gives other hidden states than were promised says so, instead of sending them."""
    group = dist.distributed_c10d._get_default_group()
    schedule = toy.schedule_for("1f1b", 2, 2)
    model = toy.whole_model(2)
    stages = {group.rank(): toy.stage_of(model, group.rank(), 2)}
    message = replace(toy.message(), dtype=torch.bfloat16)
    runner = PipelineRunner(schedule, stages, group.rank(), Mailbox(group, message))
    if group.rank() == 1:
        return "expects"  # nothing comes
    try:
        runner.step(toy.batch_of(4).microbatches(2), torch.tensor(1.0))
    except RuntimeError as error:
        return str(error)
    return ""


def test_messages_are_checked() -> None:
    assert all("expects" in one for one in on_ranks(2, wrong_width))


def evaluated(schedule: str) -> tuple[Tensor, Tensor, int]:
    group = dist.distributed_c10d._get_default_group()
    job = job_for("llama", 2, 4, schedule)
    plan, stages = schedule_of(job), local_stages(job, group.rank())
    message = Message((2, SEQUENCE, job.model.hidden), torch.float32, CPU)
    runner = PipelineRunner(plan, stages, group.rank(), Mailbox(group, message))
    batch = batch_for(job)
    loss = runner.evaluate(batch.microbatches(4), batch.counted)
    gradients = sum(one.grad is not None for stage in stages.values() for one in stage.parameters())
    kept = sum(len(one.kept) + len(one.outputs) + len(one.inputs) for one in runner.stages)
    return loss, runner.step(batch.microbatches(4), batch.counted), gradients + kept


@pytest.mark.quick(1)
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_evaluation_gives_the_same_loss_and_leaves_nothing_behind(schedule: str) -> None:
    for loss, trained_loss, left in on_ranks(2, evaluated, schedule):
        assert torch.equal(loss, trained_loss) and left == 0
