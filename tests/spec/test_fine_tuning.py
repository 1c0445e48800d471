"""What of a model is trained: published counts, and one clear line for what the model does not have."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec import Job
from shardwise.spec.errors import SpecError
from shardwise.spec.fine_tuning import BASE_FORMATS, EVERYTHING, NOTHING, Adapters
from shardwise.spec.lengths import Lengths
from shardwise.spec.parameters import parameter_count, trained_parameters
from shardwise.spec.training import Training


def job(model: Any = "llama3-8b", **training: Any) -> Job:
    return Job.from_dict({"model": model, "cluster": "dgx-h100:8", "training": training})


def trained(**training: Any) -> int:
    given = job(**training)
    return trained_parameters(given.model, given.training.tuning)


def test_everything_is_trained_by_default() -> None:
    given = job()
    assert given.training.tuning == EVERYTHING and not given.training.freezes
    assert trained() == parameter_count(given.model)
    assert trained_parameters(given.model, NOTHING) == 0


@pytest.mark.parametrize(
    ("adapters", "count"),
    [
        # PEFT's `print_trainable_parameters`: 41,943,040 of Llama-3-8B for rank 16 on all linears; 9,175,040 of
        # Llama-3.2-3B for rank 32 on q and v (its MetaMathQA page); 3,407,872 for Llama-3-8B, rank 8, q and v.
        ({"rank": 16}, 41_943_040),
        ({"rank": 8, "targets": ["q_proj", "v_proj"]}, 3_407_872),
        ({"rank": 8, "targets": ["q_proj", "v_proj"], "layers": [0, 31]}, 3_407_872 * 2 // 32),
    ],
)
def test_adapters_count_as_peft_prints(adapters: dict[str, Any], count: int) -> None:
    assert trained(adapters=adapters) == count


def test_dora_adds_a_length_for_each_output() -> None:
    outputs = 32 * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
    assert trained(adapters={"method": "dora"}) - trained(adapters={}) == outputs


def test_parts_are_trained_by_name() -> None:
    assert trained(trained=["head"]) == 128_256 * 4096
    assert trained(trained=["norms"]) == (2 * 32 + 1) * 4096
    layer = trained(trained=["layers.31"])
    assert trained(trained=["layers.28-31"]) == 4 * layer
    assert trained(trained=["layers.31.norms"]) == 2 * 4096
    parts = ("embedding", "attention", "mlp", "norms", "head")
    assert sum(trained(trained=[part]) for part in parts) == parameter_count(job().model)


def test_scaling_follows_the_papers() -> None:
    assert Adapters(rank=16, alpha=32).factor == 2.0
    assert Adapters(rank=16, alpha=32, scaling="rank-stabilised").factor == 8.0


def test_nf4_bytes_are_those_of_bitsandbytes() -> None:
    assert BASE_FORMATS["nf4"].bytes == 0.5625
    assert BASE_FORMATS["nf4-double"].bytes == pytest.approx(0.515869, abs=1e-6)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"adapters": {"targets": ["q_pro"]}}, "training.adapters.targets[0]: 'q_pro' is not a linear layer"),
        ({"adapters": {"targets": ["kv_b_proj"]}}, "has no kv_b_proj"),
        ({"adapters": {"layers": [32]}}, "32 is beyond the 32 layers"),
        ({"adapters": {"experts": True}}, "has no experts"),
        ({"trained": ["heads"]}, "training.trained[0]: 'heads' names no part"),
        ({"trained": ["layers.5-3"]}, "ends before it begins"),
        ({"trained": ["router"]}, "has no experts"),
        ({"trained": ["layers.40.norms"]}, "beyond the 32 layers"),
        ({"base_precision": "nf4"}, "every weight is trained"),
        ({"preference": {}}, "belongs to dpo"),
        ({"task": "dpo", "preference": {"reference": "adapters-off"}}, "nothing but adapters"),
        ({"lengths": {}}, "one of them is needed"),
        ({"lengths": {"mean": 400}}, "longest"),
        ({"lengths": {"histogram": [[0, 4]]}}, "not a length and a number"),
    ],
)
def test_what_the_model_does_not_have_gets_one_line(training: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as failure:
        job(**training)
    assert words in str(failure.value) and "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"adapters": {"targets": ["mlp"]}}, "training.adapters.targets: mlp, which mixtral-8x7b has in its experts"),
        ({"adapters": {"targets": ["mlp"]}, "trained": ["norms"]}, "in its experts alone; add experts: true"),
        ({"trained": ["layers.3.mlp"]}, "training.trained: layers.3.mlp, of which mixtral-8x7b has nothing"),
        ({"adapters": {"targets": ["mlp"], "experts": True}}, ""),
        ({"trained": ["layers.3.experts"]}, ""),
    ],
)
def test_a_mixture_without_what_is_named_gets_one_line(training: dict[str, Any], words: str) -> None:
    fields = {"model": "mixtral-8x7b", "cluster": "dgx-h100", "training": {"global_batch": 8, **training}}
    if not words:
        assert trained_parameters(Job.from_dict(fields).model, Job.from_dict(fields).training.tuning)
        return
    with pytest.raises(SpecError) as failure:
        Job.from_dict(fields)
    assert words in str(failure.value) and "\n" not in str(failure.value)


def test_the_reference_of_dpo_is_the_same_weights_where_only_adapters_are_trained() -> None:
    assert not job(task="dpo", adapters={}).training.reference_copy
    assert job(task="dpo").training.reference_copy
    assert job(task="dpo", adapters={}, trained=["norms"]).training.reference_copy
    assert job(task="dpo", adapters={}, preference={"reference": "copy"}).training.reference_copy


def test_a_job_file_keeps_them() -> None:
    fields = {"adapters": {"rank": 8, "targets": ["q_proj"]}, "base_precision": "nf4", "trained": ["norms"]}
    given = job(**fields, task="sft", lengths={"mean": 300, "longest": 2000})
    assert Job.from_yaml(given.to_yaml()) == given


@pytest.mark.parametrize(("mean", "longest"), [(300, 2000), (1000, 2000), (1900, 2000), (5, 9000)])
def test_a_mean_and_a_maximum_stand_for_a_law_with_that_mean(mean: float, longest: int) -> None:
    counts = Lengths(mean=mean, longest=longest).counts
    assert sum(share for _, share in counts) == pytest.approx(1)
    reached = sum(length * share for length, share in counts)
    assert reached == pytest.approx(mean, rel=0.02, abs=longest / 100) and counts[-1][0] == longest


def test_a_histogram_is_read_as_it_is() -> None:
    lengths = Training(lengths={"histogram": [[200, 3], [100, 1], [200, 1]]}).lengths  # type: ignore[arg-type]
    assert lengths is not None and lengths.counts == ((100, 0.2), (200, 0.8))


def test_the_longest_of_several_documents_is_what_drawing_them_gives() -> None:
    lengths = Lengths(histogram=((100, 1), (200, 1), (400, 2)))
    assert lengths.padded_tokens(1, 4096) == lengths.mean_tokens(4096) == 275
    assert lengths.padded_tokens(2, 4096) == pytest.approx(100 / 16 + 200 * 3 / 16 + 400 * 12 / 16)
    assert lengths.padded_tokens(1, 300) == (100 + 200 + 600) / 4
    assert lengths.cut_share(300) == pytest.approx(1 - 225 / 275)


def test_packing_is_full_where_short_documents_fill_the_gaps() -> None:
    assert Lengths(histogram=((64, 9), (300, 1))).packed_share(4096) > 0.95
    assert Lengths(histogram=((3000, 1),)).packed_share(4096) == pytest.approx(3000 / 4096)
    assert Lengths(histogram=((64, 1),)).attended_share(4096) == 64 / 4096
