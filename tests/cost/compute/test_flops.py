"""FLOPs per token against published figures and closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cost.builders import DENSE, GPT, LLAMA, job, preset
from shardwise.cost.compute.flops import (
    CONVENTIONS,
    attended_tokens,
    attended_tokens_of_rank,
    flops_per_token,
    flops_symbols,
    forward_flops,
    head_forward_flops,
    recomputed_flops_per_token,
)
from shardwise.cost.step.prediction import stage_compute
from shardwise.layout.stages import rank_contents
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import Model
from shardwise.spec.parameters import active_parameter_count, parameter_count

# Printed TFLOP/s divided by printed tokens/s of NVIDIA's tables (shared formulas.md, "FLOP conventions").
PUBLISHED_GFLOPS = {
    ("llama3-8b", 8192): 51.5,
    ("llama3-70b", 8192): 449.2,
    ("llama3-405b", 8192): 2524,
    ("qwen3-30b-a3b", 4096): 23.1,
    ("qwen3-235b-a22b", 4096): 148.3,
    ("kimi-k2", 4096): 205.5,
}


@pytest.mark.parametrize(("name", "seq"), PUBLISHED_GFLOPS)
def test_published_flops_per_token_with_causal_attention_halved(name: str, seq: int) -> None:
    published = PUBLISHED_GFLOPS[name, seq]
    assert flops_per_token(preset(name), seq) / 1e9 == pytest.approx(published, abs=0.05 if published < 1000 else 0.5)


def test_deepseek_v3_without_and_with_its_prediction_module() -> None:
    model = preset("deepseek-v3")
    assert flops_per_token(replace(model, mtp_layers=0), 4096) / 1e9 == pytest.approx(250.4, abs=0.05)
    # The tables' 260.0 leaves out the module's own projection of two states to one, 6·2h² = 0.62 GFLOP.
    projection = 6 * 2 * 7168**2 / 1e9
    assert flops_per_token(model, 4096) / 1e9 - projection == pytest.approx(260.0, abs=0.05)


def test_gpt_oss_with_every_second_layer_windowed() -> None:
    assert flops_per_token(preset("gpt-oss-120b"), 4096) / 1e9 == pytest.approx(32.6, rel=0.005)


@pytest.mark.parametrize("name", ["megatron-22b", "gpt3-175b", "mt-nlg-530b", "megatron-1t"])
def test_gpt_closed_form_is_exact(name: str) -> None:
    """72·B·L·s·h²(1 + s/6h + v/12hL): Narayanan et al. 2021, eq. 3, without the recomputed forward pass."""
    model, s = preset(name), 2048
    layers, h, v = model.layers, model.hidden, model.vocab
    closed = 72 * layers * h**2 * (1 + s / (6 * h) + v / (12 * h * layers))
    assert flops_per_token(model, s, "full-attention") == pytest.approx(closed, rel=1e-12)


def test_six_n_d() -> None:
    model = preset("llama3-8b")
    assert flops_per_token(model, 8192, "6nd") * 15e12 == 6 * 8_030_261_248 * 15e12
    mixture = preset("mixtral-8x7b")
    assert flops_per_token(mixture, 4096, "6nd") == 6 * active_parameter_count(mixture)
    assert active_parameter_count(mixture) < 0.3 * parameter_count(mixture)


def test_gpt3_training_takes_a_billion_seconds_on_one_a100() -> None:
    """3.14e23 FLOPs at 312 TFLOP/s are 1.0e9 seconds, 32 years, not 1.0e6."""
    flops = flops_per_token(preset("gpt3-175b"), 2048, "6nd") * 300e9
    assert flops == pytest.approx(3.14e23, rel=0.002)
    assert flops / 312e12 == pytest.approx(1.0e9, rel=0.01)


def test_conventions_differ_only_in_attention_and_embedding() -> None:
    model, s = preset("llama3-8b"), 8192
    attention = 12 * 32 * 32 * 128 * s
    assert flops_per_token(model, s, "palm") - flops_per_token(model, s, "6nd") == attention
    assert flops_per_token(model, s, "full-attention") - flops_per_token(model, s) == pytest.approx(attention / 2)
    embedding = 128256 * 4096
    assert flops_per_token(model, s, "palm") - flops_per_token(model, s, "torchtitan") == 6 * embedding
    assert all(flops_per_token(model, s, convention.name) > 0 for convention in CONVENTIONS)


def test_palm_convention_counts_latent_attention_by_its_own_head_sizes() -> None:
    model = preset("deepseek-v3")
    attention = flops_per_token(model, 4096, "palm") - flops_per_token(model, 4096, "6nd")
    assert attention == 6 * 61 * 128 * ((128 + 64) + 128) * 4096


def brute_force_keys(seq: int, window: int) -> float:
    return sum(min(query + 1, window) for query in range(seq)) / seq


@pytest.mark.parametrize(("seq", "window"), [(8192, 4096), (8192, 1024), (4096, 128), (4096, 8192)])
def test_windowed_causal_attention_sees_the_keys_one_counts(seq: int, window: int) -> None:
    model = replace(preset("mistral-7b"), sliding_window=window)
    # The convention s/2 leaves out the half key of the diagonal.
    assert attended_tokens(model, seq, *model.kinds) == pytest.approx(brute_force_keys(seq, window), abs=0.5)


def test_every_nth_layer_attends_to_everything() -> None:
    model = replace(LLAMA, sliding_window=16, sliding_window_every=4)
    assert [(kind.mixer, count) for kind, count in model.layers_of_kinds] == [("window", 6), ("full", 2)]
    windowed, full = (attended_tokens(model, 128, kind) for kind in model.kinds)
    assert windowed == pytest.approx(brute_force_keys(128, 16), abs=0.5) and full == 64
    assert {name: value for name, _, value in flops_symbols(model, 128)}["K"] == (3 * windowed + full) / 4


@pytest.mark.parametrize(("seq", "chunk"), [(1024, 256), (1000, 256), (128, 256)])
def test_queries_attend_to_the_keys_of_their_chunk(seq: int, chunk: int) -> None:
    """As one counts; every fourth layer attends to all keys."""
    pattern = (LayerRecord(mixer="chunk", repeat=3), LayerRecord(rotary=False))
    model = replace(LLAMA, attention_chunk=chunk, pattern=pattern)
    own = sum(query % chunk + 1 for query in range(seq)) / seq
    assert [attended_tokens(model, seq, kind) for kind in model.kinds] == [pytest.approx(own, abs=0.5), seq / 2]


@pytest.mark.parametrize("chunk", [64, 200, 512])
def test_ranks_see_unequal_parts_of_chunks(chunk: int) -> None:
    model = replace(LLAMA, attention_chunk=chunk, pattern=(LayerRecord(mixer="chunk"),))
    ranks = [attended_tokens_of_rank(model, 1024, *model.kinds, 4, rank) for rank in range(4)]
    assert sum(ranks) / 4 == pytest.approx(attended_tokens(model, 1024, *model.kinds))


def test_an_encoder_attends_to_the_whole_sequence() -> None:
    assert attended_tokens(preset("bert-large"), 512, DENSE) == 512


def test_full_recompute_costs_four_thirds_of_the_layers() -> None:
    layers_once = forward_flops(GPT, 128) - head_forward_flops(GPT)
    assert recomputed_flops_per_token(GPT, 128, "full", ()) == layers_once
    plain, full = (
        stage_compute(case, rank_contents(case, 0)) for case in (job(GPT, dp=1), job(GPT, dp=1, recompute="full"))
    )
    head = 3 * head_forward_flops(GPT) * 128 / 1e12
    assert (full.forward + full.backward - head) / (plain.forward + plain.backward - head) == pytest.approx(4 / 3)


def test_selective_recompute_repeats_attention_only() -> None:
    """2·2·s²/2·h per sequence and layer."""
    again = recomputed_flops_per_token(GPT, 128, "selective", ("attention",))
    assert again == 8 * 2 * 2 * 64 * 64
    assert recomputed_flops_per_token(GPT, 128, "selective", ("norm", "activation")) == 0


def test_backward_is_twice_forward_and_work_divides_over_all_devices() -> None:
    """The seconds of all devices together are the model's FLOPs over one device's peak."""
    case = job(LLAMA, tp=2, cp=2, dp=2, pp=4, training={"global_batch": 8})
    seconds = 0.0
    for rank in range(4):
        stage = stage_compute(case, rank_contents(case, rank))
        assert stage.backward == 2 * stage.forward
        seconds += case.microbatches * (stage.forward + stage.backward) * 2 * 2 * 2
    assert seconds * 1e12 == pytest.approx(flops_per_token(LLAMA, 128) * 8 * 128)


def test_prediction_modules_take_time_on_the_last_stage() -> None:
    def last_stage(model: Model) -> float:
        case = job(model, dp=1, pp=2, stage_layers="balanced")
        return stage_compute(case, rank_contents(case, 1)).forward

    model = preset("deepseek-v3")
    extra = last_stage(model) - last_stage(replace(model, mtp_layers=0))
    per_token = forward_flops(model, 128) - forward_flops(replace(model, mtp_layers=0), 128)
    assert extra == pytest.approx(per_token * 128 / 1e12)


def test_some_layers_recomputed() -> None:
    none, some, full = (
        stage_compute(case, rank_contents(case, 0)).backward
        for case in (
            job(GPT, dp=1),
            job(GPT, dp=1, recompute="full", recompute_layers=2),
            job(GPT, dp=1, recompute="full"),
        )
    )
    assert some - none == pytest.approx((full - none) * 2 / 8)


@pytest.mark.parametrize(("window", "every"), [(100, 1), (100, 3), (900, 1)])
def test_ranks_see_unequal_parts_of_a_window(window: int, every: int) -> None:
    model = replace(LLAMA, sliding_window=window, sliding_window_every=every)
    windowed, *others = model.kinds
    ranks = [attended_tokens_of_rank(model, 1024, windowed, 4, rank) for rank in range(4)]
    assert sum(ranks) / 4 == pytest.approx(attended_tokens(model, 1024, windowed))
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    for kind in others:
        assert {attended_tokens_of_rank(model, 1024, kind, 4, rank) for rank in range(4)} == {512}
