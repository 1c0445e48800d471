"""`shardwise.parallelize` as it is used: batches, formats, first values, saving; and what it refuses in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise
from engine.own_model.networks import SEQ, VOCAB, WRITER, Case, build, make_batch, plain_run, summed_loss
from engine.workers import on_ranks
from shardwise.engine.own_model.checks import require_trainable
from shardwise.engine.own_model.tables import job_for
from shardwise.engine.parallelize import gather_state_dict, parallelize
from shardwise.engine.parameters import HeldPart
from shardwise.engine.patterns import Patterns
from shardwise.spec.errors import SpecError
from shardwise.spec.strategy import Offload, Strategy
from shardwise.spec.training import Training

transformers = pytest.importorskip("transformers")
TRAINING = Training(global_batch=2, seq=SEQ, precision="fp32")


# -- what it takes and gives -----------------------------------------------------------------------------------------


def share(case: Case, parallel: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    rank, size = parallel.mesh.rank("dp"), parallel.mesh.size("dp")
    return {name: one.chunk(size)[rank] for name, one in batch.items()}


def losses_of(case: Case, extra: str = "") -> list[float]:
    """Losses of three steps, by what a user unpacks."""
    parallel = case.parallelize(build(case.network), loss=summed_loss if case.network == "perceptron" else None)
    _, _, step = parallel
    batches = [with_extra(make_batch(case.network, case.samples, number), extra) for number in range(3)]
    return [float(step(share(case, parallel, batch)).loss) for batch in batches]


def with_extra(batch: dict[str, Tensor], extra: str) -> dict[str, Tensor]:
    if extra == "padded":
        mask = torch.ones_like(batch["input_ids"])
        mask[:, -3:] = 0
        return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    if extra == "packed":
        half = torch.arange(SEQ // 2)
        return {**batch, "position_ids": torch.cat([half, half]).expand_as(batch["input_ids"]).contiguous()}
    return batch


@pytest.mark.quick(1)
@pytest.mark.parametrize("extra", ["padded", "packed"])
@pytest.mark.parametrize("fields", [{"tp": 2}, {"cp": 2, "context_method": "all-gather"}], ids=["tp", "cp"])
def test_masks_and_positions_mean_what_they_mean_in_transformers(extra: str, fields: dict[str, Any]) -> None:
    case = Case("llama", fields)
    batch = with_extra(make_batch("llama", case.samples, 0), extra)
    outputs = build("llama")(**{name: one for name, one in batch.items() if name != "labels"}, use_cache=False)
    expected = summed_loss(outputs, batch) / (batch["labels"][:, 1:] != -100).sum()
    assert on_ranks(2, losses_of, case, extra)[0][0] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.quick(2)
@pytest.mark.parametrize("network", ["perceptron", pytest.param("llama", marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["bf16", "bf16-fp32-grads", "fp16"])
@pytest.mark.parametrize("zero", [0, 3])
def test_it_trains_in_sixteen_bits(network: str, precision: str, zero: int) -> None:
    case = Case(network, {"dp": 2, "zero": zero}, precision=precision)
    losses = on_ranks(2, losses_of, case)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(plain_run(network, case.samples).losses, rel=2e-2)


def from_nothing(case: Case) -> float:
    values = build(case.network).state_dict() | dict(build(case.network).named_buffers())
    with torch.device("meta"):
        module = build(case.network)
    parallel = case.parallelize(module, initialise=lambda name, shape: values[name])
    return float(parallel.step(share(case, parallel, make_batch(case.network, case.samples, 0))).loss)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case",
    [Case("llama", {"dp": 2, "zero": 3}), Case("llama", {"tp": 2}), Case("gemma2", {"tp": 2})],
    ids=["zero", "tp", "scaled"],
)
def test_a_network_without_values_is_filled_by_a_function(case: Case) -> None:
    expected = plain_run(case.network, case.samples).losses[0]
    assert on_ranks(2, from_nothing, case)[0] == pytest.approx(expected, rel=1e-5)


def saved(case: Case, folder: str) -> None:
    module = build(case.network)
    kind, config = type(module), module.config
    parallel = case.parallelize(module)
    parallel.step(share(case, parallel, make_batch(case.network, case.samples, 0)))
    state = gather_state_dict(parallel)
    if dist.get_rank() == 0:
        whole = kind(config)
        whole.load_state_dict(state)
        whole.save_pretrained(folder)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "case",
    [Case("llama-tied", {"tp": 2}), Case("mixtral", {"dp": 2, "ep": 2, "zero": 3})],
    ids=lambda case: case.network,
)
def test_a_hugging_face_folder_is_saved_and_read(case: Case, tmp_path: Path) -> None:
    on_ranks(2, saved, case, str(tmp_path))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert read(torch.zeros((1, 4), dtype=torch.long)).logits.shape == (1, 4, VOCAB)
    before = build(case.network).state_dict()
    assert {name for name, one in read.state_dict().items() if torch.equal(one, before[name])} == set()


def called_by_itself(fields: dict[str, Any]) -> float:
    module = parallelize(build("llama"), Strategy(**{"dp": 1, **fields}), training=TRAINING).module
    tokens = make_batch("llama", 2, 0)["input_ids"]
    positions = torch.arange(SEQ)[None]
    return float((module(tokens, position_ids=positions).logits - build("llama")(tokens).logits).abs().max())


def test_the_module_still_gives_logits() -> None:
    assert max(on_ranks(2, called_by_itself, {"tp": 2})) < 1e-5


def steps_of(network: str) -> tuple[float, set[str]]:
    """Of a network that drops something while it trains, with a loss of the user's own."""
    seen: set[str] = set()

    def loss(outputs: Any, batch: Any) -> Tensor:
        seen.update(batch)
        return summed_loss(outputs, batch)

    parallel = parallelize(build(network), Strategy(dp=2, zero=1), training=TRAINING, loss=loss)
    return float(parallel.step(parallel.share(make_batch(network, 2, 0))).loss), seen


@pytest.mark.parametrize("network", ["gpt-drops", "llama"])
def test_a_loss_finds_the_labels_that_were_given(network: str) -> None:
    loss, seen = on_ranks(2, steps_of, network)[0]
    assert 0 < loss < 10 and {"input_ids", "labels"} <= seen


# -- what it refuses -------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)


class Louder(nn.Linear):
    """A head that does more than its class."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def refusal(world: int, network: str, fields: dict[str, Any], **arguments: Any) -> str:
    return str(on_ranks(world, _refused, network, fields, arguments)[0])


def _refused(network: str, fields: dict[str, Any], arguments: dict[str, Any]) -> str:
    module: nn.Module = Normed() if network == "normed" else build("writer" if network == "louder" else network)
    if network == "louder":
        module.out = Louder(32, VOCAB)
    if arguments.pop("meta", False):
        module = module.to("meta")
    if arguments.pop("dropout", False):
        module.config.attention_dropout = 0.1  # type: ignore[union-attr]
    before = [name for name, _ in module.named_parameters()]
    job = arguments.pop("job", None) or Strategy(**{"dp": 1, **fields})
    training = arguments.pop("training", TRAINING) if isinstance(job, Strategy) else None
    try:
        parallelize(module, job, training=training, **arguments)
    except SpecError as error:
        assert before == [name for name, _ in module.named_parameters()], "refused too late"
        return str(error)
    raise AssertionError("was not refused")


@pytest.mark.parametrize(
    ("network", "fields", "arguments", "said"),
    [
        ("perceptron", {"tp": 2}, {}, r"strategy.tp: 2, but no table says what the modules of Perceptron are; pass"),
        ("perceptron", {"pp": 2}, {}, r"strategy.pp: 2, but no table"),
        ("perceptron", {"cp": 2}, {}, r"strategy.cp: 2, but no table"),
        ("perceptron", {"dp": 2, "ep": 2}, {}, r"strategy.ep: 2, but no table"),
        ("perceptron", {"dp": 2}, {}, r"loss: is not given, and Perceptron has no table"),
        ("normed", {"dp": 2}, {"loss": summed_loss}, r"module: norm takes its statistics from .* use LayerNorm"),
        ("perceptron", {"dp": 2}, {"loss": summed_loss, "meta": True}, r"module: start.weight has no values .*init"),
        ("perceptron", {"dp": 4}, {"loss": summed_loss}, r"4 ranks, but"),
        ("llama", {"dp": 2}, {"training": replace(TRAINING, compile=True)}, r"compile: true, but your own layers"),
        ("perceptron", {"dp": 2}, {"loss": summed_loss, "training": replace(TRAINING, attention="unfused")},
         r"training.attention: unfused, but no table"),
        ("llama", {"tp": 2}, {"dropout": True}, r"module: has dropout 0.1"),
        ("stablelm", {"tp": 2}, {}, r"strategy.tp: 2, but no table says what the modules of StableLm\w+ are; pass"),
        ("persimmon", {"tp": 2}, {"patterns": WRITER},
         r"module.config.model_type: 'persimmon' is not supported; .*gpt2"),
        ("gpt2", {"dp": 2}, {"training": replace(TRAINING, optimizer="muon")},
         r"training.optimizer: muon, but GPT2LMHeadModel has no weight matrices below a module called layers"),
        ("gpt2", {"tp": 2}, {},
         r"strategy.sequence_parallel: true, but GPT2LMHeadModel views .* as whole sequences; set it to false"),
        ("gpt2", {"pp": 2}, {}, r"strategy.pp: 2, but GPT2LMHeadModel reshapes its input .*; use tp, cp, dp or zero"),
        ("gpt-drops", {"tp": 2, "sequence_parallel": False}, {}, r"module: has dropout 0.1"),
        ("writer", {"dp": 2}, {"patterns": replace(WRITER, logit_cap="cap")},
         r"patterns.logit_cap: Writer has no attribute config.cap"),
        ("writer", {"dp": 2}, {"patterns": replace(WRITER, divided={"blocks.*.mixer": ("width",)})},
         r"patterns.divided: Mixer has no attribute width"),
        ("louder", {"dp": 2}, {"patterns": WRITER}, r"patterns.head: out has a forward pass of its own \(Louder\)"),
        ("llama", {"pp": 2, "schedule": "dualpipe"}, {}, r"strategy: dualpipe"),
        ("llama", {"dp": 2, "ep": 2}, {}, r"strategy.ep: 2, but llama has no experts"),
        ("writer", {"dp": 2}, {"patterns": replace(WRITER, rows=("blocks.*.write",))},
         r"patterns.rows: 'blocks.\*.write' matches no module"),
        ("writer", {"dp": 2}, {"patterns": replace(WRITER, columns={"blocks.*.before": ""})},
         r"patterns.columns: blocks.0.before is not a Linear"),
        ("writer", {"dp": 2}, {"patterns": replace(WRITER, head="words")}, r"patterns.head: words is not a Linear"),
        ("writer", {}, {"patterns": replace(WRITER, positions=""), "job": Case("writer", {"cp": 2}).job},
         r"strategy.cp: 2, but the table does not name positions"),
        ("writer", {}, {"patterns": replace(WRITER, attention="blocks.*.feed"), "job": Case("writer", {"cp": 2}).job},
         r"patterns.attention: blocks.0.feed has no attribute attend"),
        ("writer", {"pp": 2}, {"patterns": WRITER}, r"job: is only a strategy, which does not describe the heads"),
    ],
)  # fmt: skip
def test_it_is_refused_in_one_line(network: str, fields: dict[str, Any], arguments: dict[str, Any], said: str) -> None:
    found = refusal(2, network, fields, **arguments)
    assert re.search(said, found), found
    assert "\n" not in found


def test_key_value_heads_inside_a_fused_map_are_not_repeated() -> None:
    said = refusal(4, "phi3", {"tp": 4})
    assert said.startswith("strategy.tp: 4 does not divide the 2 key_value_heads inside 'model.layers.*.self_attn.qkv")


def test_attention_that_leaves_out_a_soft_cap_is_refused() -> None:
    module: Any = build("gemma2")
    module.config._attn_implementation = "sdpa"
    with pytest.raises(SpecError, match="sdpa leaves out the soft cap"):
        require_trainable(module, job_for(module, Strategy(dp=1), None, 1), tabled=True, initialised=False)


def test_without_processes_it_says_so() -> None:
    with pytest.raises(SpecError, match="0 processes have joined"):
        parallelize(build("perceptron"), Strategy(dp=1), loss=summed_loss)


def wrong_batches() -> list[str]:
    parallel = parallelize(build("llama"), Strategy(dp=1, microbatch=2), training=TRAINING)
    good, said = make_batch("llama", 2, 0), []
    for bad in ({"input_ids": good["input_ids"]}, {**good, "token": good["labels"]},
                {name: one[:1] for name, one in good.items()}):  # fmt: skip
        try:
            parallel.step(bad)
        except SpecError as error:
            said.append(str(error))
    return said


def test_a_batch_that_is_none_is_refused() -> None:
    first, second, third = on_ranks(1, wrong_batches)[0]
    assert "no labels" in first
    assert second.startswith("batch.token: is not known")
    assert "1 rows on this rank, which are not a multiple of 2" in third


class Softened(nn.Module):
    """Returns something else than its head's logits: the loss of the head would be another loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.out(self.words(input_ids))
        return 30 * torch.tanh(logits / 30)


def softened() -> str:
    table = Patterns(layers="", embedding="words", norm="", head="out", regions=())
    parallel = parallelize(Softened(), Strategy(dp=1), training=TRAINING, patterns=table)
    with pytest.raises(SpecError) as error:
        parallel.step(make_batch("llama", 2, 0))
    return str(error.value)


def test_a_network_that_changes_its_logits_needs_its_own_loss() -> None:
    assert on_ranks(1, softened)[0].startswith("patterns.head: the network changes its head's output")


def exported(strategy: Strategy, precision: str) -> dict[str, Tensor]:
    parallel = parallelize(build("llama"), strategy, training=replace(TRAINING, precision=precision))
    batch = make_batch("llama", 2, 0)
    for _ in range(2):
        parallel.step(parallel.share(batch))
    return gather_state_dict(parallel)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("zero", "precision", "weights"), [(0, "fp16", 0.0), (3, "fp32", 0.6)])
def test_what_is_offloaded_is_exported_as_it_is_trained(zero: Any, precision: str, weights: float) -> None:
    here = Strategy(dp=2, zero=zero)
    there = replace(here, offload=Offload(optimizer=0.8, weights=weights))
    expected, found = (on_ranks(2, exported, one, precision)[0] for one in (here, there))
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7, msg=name)


def test_the_names_are_public() -> None:
    assert shardwise.parallelize is parallelize
    assert shardwise.gather_state_dict is gather_state_dict
    assert shardwise.Patterns is Patterns


@pytest.mark.parametrize("part", range(2))
def test_a_part_of_blocks_is_taken_and_put_back(part: int) -> None:
    whole = torch.arange(2 * 8 * 3).view(2, 8, 3)
    described = HeldPart(tuple(whole.shape)).cut(0, 1, 2).cut(1, 2 * part, 2 * part + 2, 2)
    local = described.of(whole)
    assert torch.equal(local, whole[1:2, [2 * part, 2 * part + 1, 4 + 2 * part, 5 + 2 * part]])
    assert described.local_shape == tuple(local.shape)
    back = torch.zeros_like(whole)
    described.put(local, back)
    assert torch.equal(described.of(back), local)
    assert back.count_nonzero() == local.count_nonzero()
