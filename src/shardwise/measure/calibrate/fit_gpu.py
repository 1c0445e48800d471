"""Fits the constants that steps on a GPU are priced with to what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from shardwise.cost.compute.operators import Operator, OperatorRole
from shardwise.cost.compute.roofline import operator_seconds
from shardwise.cost.step.stage_time import optimizer_seconds, stage_seconds, unslowed_seconds
from shardwise.layout.sharding import sharding_of
from shardwise.layout.stages import rank_contents
from shardwise.measure.calibrate.fit import Fit, Residual, fit
from shardwise.measure.calibrate.gpu_samples import AttentionFigure, CopyFigure, GpuSamples, Mix, ProductFigure
from shardwise.measure.calibrate.steps import CaseSample, case_job
from shardwise.spec.codec import FrozenMapping
from shardwise.spec.efficiency import MODES, PASSES, SCALINGS, Efficiency, EngineKernels
from shardwise.spec.hardware import Device
from shardwise.spec.job import Job
from shardwise.spec.stack import default_stack
from shardwise.spec.training import RECIPES

_HEAD_FEATURES = 64  # cuDNN and FlashAttention have kernels of 64, 128, 192 and 256 features
_KEPT = ("device_spread", "layer_jitter", "overlapped_tp_exposed", "routing_seconds", "elementwise_traffic",
         "older_attention", "stored_scores_traffic", "routing_traffic")  # fmt: skip  # what a single GPU cannot show
_NOTHING = EngineKernels(
    eager=FrozenMapping(dict.fromkeys(PASSES, 0.0)), compiled=FrozenMapping(dict.fromkeys(PASSES, 0.0)),
    layer_seconds=FrozenMapping(), host_seconds=FrozenMapping(), update_traffic=0.0, loss_traffic=0.0,
    accumulation_traffic=0.0, routing=FrozenMapping(dict.fromkeys(MODES, 0.0)), score_traffic=0.0,
    casts=FrozenMapping(dict.fromkeys(SCALINGS, 0.0)),
)  # fmt: skip


def fitted_gpu(base: Device, samples: GpuSamples, memory_bytes: int) -> tuple[Device, list[Residual]]:
    """``base`` with its data sheet's peaks, and everything that was measured as shares of them."""
    copies = [figure for figure in samples.figures if isinstance(figure, CopyFigure)]
    copied = max(2 * copy.bytes / copy.seconds for copy in copies if 2 * copy.bytes > 4 * base.cache)
    slowest, of_attention, other = fitted_power(samples.mixes)
    kept = {name: getattr(base.efficiency, name) for name in _KEPT}
    efficiency = Efficiency(
        **kept, gemm=base.efficiency.gemm, operand_traffic=0.0, memory=min(1.0, copied / base.memory_bandwidth),
        operator_seconds=0.0, step_seconds=0.0, power_slowdown=slowest,
        attention_slowdown=of_attention, other_power=other, own=_NOTHING,
    )  # fmt: skip
    device = replace(base, driver_memory=max(0.0, base.memory - memory_bytes), efficiency=efficiency)
    slowed = _slowed_figures(efficiency, samples)
    products = [
        replace(figure, seconds=figure.seconds / slowed)
        for figure in samples.figures
        if isinstance(figure, ProductFigure)
    ]
    attentions = [replace(figure, seconds=figure.seconds / slowed)
                  for figure in samples.figures if isinstance(figure, AttentionFigure)]  # fmt: skip
    residuals: list[Residual] = []
    for with_some in (_with_products, _with_experts, _with_scaled):
        device, errors = with_some(device, products)
        residuals += errors
    device, errors = _with_attention(device, attentions)
    residuals += errors
    device, errors = _with_steps(device, samples.cases)
    return device, [*residuals, *errors]


def fitted_power(mixes: Sequence[Mix]) -> tuple[float, float, float]:
    """The ``power_slowdown``, ``attention_slowdown`` and ``other_power`` that best explain the measured mixes."""
    matmuls, attentions = ([mix for mix in mixes if mix.attention == wanted] for wanted in (False, True))
    best = float("inf"), Efficiency()
    for other in range(40, 100, 2):
        for percent in range(100, 150):
            tried = Efficiency(power_slowdown=percent / 100, other_power=other / 100)
            best = min(best, (_misfit(matmuls, tried.slowdown_at), tried), key=lambda scored: scored[0])
    fitted = best[1]
    if attentions and fitted.power_slowdown > 1:
        tries = [replace(fitted, attention_slowdown=percent / 100) for percent in range(100, 150)]
        fitted = min(tries, key=lambda tried: _misfit(attentions, partial(tried.slowdown_at, 0.0)))
    return fitted.power_slowdown, fitted.attention_slowdown, fitted.other_power


def _misfit(mixes: Sequence[Mix], slowdown_at: Callable[[float], float]) -> float:
    fitted = fit([(slowdown_at(mix.share),) for mix in mixes], [mix.seconds for mix in mixes])
    return sum(error * error for error in fitted.residuals)


def _slowed_figures(efficiency: Efficiency, samples: GpuSamples) -> float:
    """How much the power limit slowed down the figures, which were launched in turn for about equally long."""
    kinds = [isinstance(figure, AttentionFigure) for figure in samples.figures if not isinstance(figure, CopyFigure)]
    attention = samples.figures_share * sum(kinds) / len(kinds)
    return efficiency.slowdown_at(samples.figures_share - attention, attention)


# -- kernels: the feature of a coefficient is its price, so there is no second model of a kernel -----


def _changed(device: Device, **changes: Any) -> Device:
    return replace(device, efficiency=replace(device.efficiency, **changes))


def _own_changed(device: Device, **changes: Any) -> Device:
    assert device.efficiency.own
    return _changed(device, own=replace(device.efficiency.own, **changes))


def _priced(figure: ProductFigure, device: Device) -> float:
    operator = Operator(
        OperatorRole.MLP, "product", figure.rows, figure.columns, figure.inner, matrices=figure.matrices,
        expert=figure.matrices > 1,
    )  # fmt: skip
    recipe = next(known for known in RECIPES.values() if known.scaling == figure.scaling and known.wide == "bf16")
    passes = operator_seconds(operator, device, recipe, default_stack()).passes
    return float(passes[("forward", "input", "weight").index(figure.product)])


def _with_products(device: Device, figures: Sequence[ProductFigure]) -> tuple[Device, list[Residual]]:
    """Fits the asymptotic rate, and what short inner dimensions, the last wave of tiles and operands cost."""
    plain = [figure for figure in figures if figure.matrices == 1 and not figure.scaling]

    def at(**changes: float) -> list[float]:
        full = {"gemm": FrozenMapping({**device.efficiency.gemm, "bf16": 1.0}), "gemm_rolloff": 0.0, "gemm_tail": 0.0}
        return [_priced(figure, _changed(device, **{**full, "operand_traffic": 0.0, **changes})) for figure in plain]

    bare = at()
    columns = [bare, *([changed - none for changed, none in zip(at(**{name: 1.0}), bare)]
                       for name in ("gemm_rolloff", "gemm_tail", "operand_traffic"))]  # fmt: skip
    features = [(*row, 1.0) for row in zip(*columns)]
    fitted_seconds = fit(features, [figure.seconds for figure in plain])
    slower, rolloff, tail, traffic, _ = fitted_seconds.values
    share = min(1.0, 1 / slower)
    gemm = FrozenMapping({**device.efficiency.gemm, **dict.fromkeys(("bf16", "fp16"), share)})
    fitted = _changed(
        device, gemm=gemm, gemm_rolloff=rolloff / slower, gemm_tail=tail / slower, operand_traffic=traffic
    )
    return fitted, [Residual.of("matmuls in bf16", fitted_seconds)]


def _with_experts(device: Device, figures: Sequence[ProductFigure]) -> tuple[Device, list[Residual]]:
    grouped = [figure for figure in figures if figure.matrices > 1]
    if not grouped:
        return device, []
    even = _changed(device, expert_gemm=1.0)
    bare, with_a_row = (
        [_priced(figure, _changed(even, expert_rolloff=rows)) for figure in grouped] for rows in (0.0, 1.0)
    )
    features = [(base, more - base) for base, more in zip(bare, with_a_row)]
    fitted_seconds = fit(features, [figure.seconds for figure in grouped], expected=(1.0, 100.0))
    slower, by_rows = fitted_seconds.values
    slower = max(1.0, slower)
    fitted = _changed(device, expert_gemm=1 / slower, expert_rolloff=by_rows / slower)
    return fitted, [Residual.of("matmuls of experts", fitted_seconds)]


def _with_scaled(device: Device, figures: Sequence[ProductFigure]) -> tuple[Device, list[Residual]]:
    shares, residuals = {}, []
    for scaling in dict.fromkeys(figure.scaling for figure in figures if figure.scaling):
        own = [figure for figure in figures if figure.scaling == scaling]
        full = _own_changed(device, scaled=FrozenMapping({scaling: 1.0}))
        fitted_seconds = fit([(_priced(figure, full),) for figure in own], [figure.seconds for figure in own])
        shares[scaling] = min(1.0, 1 / fitted_seconds.values[0])
        residuals.append(Residual.of(f"matmuls in FP8, a scale per {scaling}", fitted_seconds))
    gemm = FrozenMapping({**device.efficiency.gemm, **({"fp8": max(shares.values())} if shares else {})})
    return _changed(_own_changed(device, scaled=FrozenMapping(shares)), gemm=gemm), residuals


def _with_attention(device: Device, figures: Sequence[AttentionFigure]) -> tuple[Device, list[Residual]]:
    """Fits, for each pass, the rate, the FLOPs per score, and the keys that a tile on the diagonal adds."""
    device = _changed(device, exponential_flops=0.0, head_features=_HEAD_FEATURES)
    plain = [figure for figure in figures if figure.window is None and figure.softcap is None]
    forward = [figure for figure in plain if not figure.both]
    backward = [replace(both, seconds=both.seconds - alone.seconds)
                for alone, both in zip(forward, [figure for figure in plain if figure.both])]  # fmt: skip
    kept, first = _attention_pass(forward)
    kept_backward, second = _attention_pass(backward)
    peak = device.peak_flops("bf16")
    fitted = _changed(
        device, attention_forward=min(1.0, 1 / (first.values[0] * peak)), attention_rolloff=kept,
        score_flops=first.values[1] / first.values[0],
        attention_backward=min(1.0, 2.5 / (second.values[0] * peak)), backward_rolloff=kept_backward,
        backward_score_flops=second.values[1] / second.values[0],
    )  # fmt: skip
    residuals = [Residual.of("attention, forward", first), Residual.of("attention, backward", second)]
    speeds = {
        name: float(operator_seconds(_attention(figure), fitted, RECIPES["bf16"], default_stack()).total)
        / figure.seconds
        for figure in figures if figure.both
        for name in ("windowed_attention" if figure.window else "capped_attention" if figure.softcap else "",) if name
    }  # fmt: skip
    return (_own_changed(fitted, **speeds) if speeds else fitted), residuals


def _attention_pass(figures: Sequence[AttentionFigure]) -> tuple[float, Fit]:
    """The best rolloff, with the fitted seconds per FLOP and per score.

    The best has the smallest absolute errors, not squared ones: some sizes have kernels of their own.
    """
    seconds = [figure.seconds for figure in figures]
    tries = [(float(rolloff), fit([_attention_work(figure, rolloff) for figure in figures], seconds))
             for rolloff in range(0, 1025, 32)]  # fmt: skip
    return min((tried for tried in tries if tried[1].values[0]), key=lambda tried: sum(map(abs, tried[1].residuals)))


def _attention(figure: AttentionFigure) -> Operator:
    seen = figure.seq / 2 if figure.window is None else figure.window - figure.window**2 / (2 * figure.seq)
    features = figure.heads * (figure.features + figure.value_features)
    return Operator(OperatorRole.ATTENTION, "attention", figure.batch * figure.seq, figure.seq, features, figure.heads,
                    seen / figure.seq)  # fmt: skip


def _attention_work(figure: AttentionFigure, rolloff: float) -> tuple[float, float]:
    """FLOPs (in whole tiles of features) and scores that the mask leaves."""
    operator, features = _attention(figure), (figure.features + figure.value_features) / 2
    whole = _HEAD_FEATURES * math.ceil(features / _HEAD_FEATURES) / features
    seen = operator.attended + min(1.0, rolloff / operator.columns)
    return whole * operator.flops * seen, operator.rows * operator.columns * operator.heads * seen


# -- whole steps -------------------------------------------------------------------------------------

# Roughly what PyTorch's kernels move: expected values, for what no measured step determines.
_EXPECTED = {"eager": (1.6, 5.0, 20.0, 1.8), "compiled": (1.1, 3.0, 1.6, 1.0)}
_LARGEST_UPDATES = 5
_LAYER_SECONDS = {"eager": (2e-4, 3e-4), "compiled": (1.5e-4, 1.5e-4)}


def _with_steps(device: Device, cases: Sequence[CaseSample]) -> tuple[Device, list[Residual]]:
    recorded = [sample for sample in cases if sample.case.graphs]
    updates = sorted(recorded, key=lambda sample: -sample.update_seconds)[:_LARGEST_UPDATES]  # others wait for the host
    times = [sample.update_seconds / _update(case_job(sample.case, _own_changed(device, update_traffic=1.0)))
             for sample in updates]  # fmt: skip
    device = _own_changed(device, update_traffic=statistics.median(times))
    dense = [sample for sample in recorded if sample.case.model.moe is None and sample.case.precision == "bf16"
             and sample.case.microbatches == 1]  # fmt: skip
    device, fitted = _with_passes(device, dense)
    residuals = [Residual.of("passes of dense models", fitted)]
    device = _with_accumulation(device, [sample for sample in recorded if sample.case.microbatches > 1])
    mixtures = [sample for sample in recorded if sample.case.model.moe is not None]
    changes = {"routing": _setting("routing", "eager"), "scores": _setting("score_traffic"),
               "starts": _setting("layer_seconds", "mixture")}  # fmt: skip
    device, fitted = _with(
        device, [sample for sample in mixtures if not sample.case.compile], changes, (8.0, 5.0, 2e-4)
    )
    residuals.append(Residual.of("passes of mixtures of experts", fitted))
    compiled = [sample for sample in mixtures if sample.case.compile]
    device, _ = _with(device, compiled, {"routing": _setting("routing", "compiled")}, (8.0,))
    for sample in recorded:
        scaling = RECIPES[sample.case.precision].scaling
        if scaling:
            device, fitted = _with(device, [sample], {scaling: _setting("casts", scaling)}, (2.5,))
    return _with_host(device, [sample for sample in cases if not sample.case.graphs]), residuals


def _with_accumulation(device: Device, cases: Sequence[CaseSample]) -> Device:
    """Fits what steps of several microbatches take beyond their passes and the update."""
    times = []
    for sample in cases:
        job, more = (case_job(sample.case, _own_changed(device, accumulation_traffic=value)) for value in (0.0, 1.0))
        beyond = sample.step_seconds - _update(job) - _passes(job)
        times.append(max(0.0, beyond) / (_update(more) - _update(job)))
    return _own_changed(device, accumulation_traffic=statistics.median(times)) if times else device


Change = Callable[[Device, float], Device]


def _setting(name: str, key: str | None = None) -> Change:
    """A function that sets a constant of our own engine, or one key of it."""

    def change(device: Device, value: float) -> Device:
        own = device.efficiency.own
        assert own
        if key is None:
            return _own_changed(device, **{name: value})
        return _own_changed(device, **{name: FrozenMapping({**getattr(own, name), key: value})})

    return change


def _with_passes(device: Device, cases: Sequence[CaseSample]) -> tuple[Device, Fit]:
    changes: dict[str, Change] = {"loss": _setting("loss_traffic")}
    expected = [1.0]
    for mode in MODES:
        changes |= {f"{mode} {name}": _setting(mode, name) for name in PASSES}
        changes |= {f"{mode} starts": _setting("layer_seconds", mode),
                    f"{mode} starts, rotary": _setting("layer_seconds", f"{mode} rotary")}  # fmt: skip
        expected += [*_EXPECTED[mode], *_LAYER_SECONDS[mode]]
    return _with(device, cases, changes, expected)


def _with(
    device: Device, cases: Sequence[CaseSample], changes: Mapping[str, Change], expected: Sequence[float]
) -> tuple[Device, Fit]:
    """Fits the constants that explain what the passes of ``cases`` take beyond their matmuls and attention.

    The power slowdown of those is taken from the measured step: apart from it prices are linear in the constants.
    """
    if not cases:
        return device, Fit((), ())
    even = _changed(device, power_slowdown=1.0)
    bare = [_passes(case_job(sample.case, even)) for sample in cases]
    known = [base + _slowed(device, sample) for base, sample in zip(bare, cases)]
    columns = [[_passes(case_job(sample.case, change(even, 1.0))) - base for sample, base in zip(cases, bare)]
               for change in changes.values()]  # fmt: skip
    updates = [_update(case_job(sample.case, device)) for sample in cases]
    passes = [sample.step_seconds - update for sample, update in zip(cases, updates)]
    fitted = fit(list(zip(*columns)), passes, known, expected)
    for change, value in zip(changes.values(), fitted.values):
        device = change(device, value)
    return device, fitted


def _passes(job: Job) -> float:
    seconds = stage_seconds(job, rank_contents(job, 0))
    return job.microbatches * float(seconds.forward + seconds.backward)


def _slowed(device: Device, sample: CaseSample) -> float:
    """Seconds that the power limit adds to a measured step, by `Efficiency.slowdown_at` as a fixed point."""
    matmuls, attention, _ = unslowed_seconds(case_job(sample.case, device))
    slower = 1.0
    for _ in range(12):
        shares = (min(1.0, slower * part / sample.step_seconds) for part in (matmuls, attention))
        slower = device.efficiency.slowdown_at(*shares)
    return (slower - 1) * (matmuls + attention)


def _update(job: Job) -> float:
    return float(optimizer_seconds(job, rank_contents(job, 0), sharding_of(job.strategy)))


def _with_host(device: Device, cases: Sequence[CaseSample]) -> Device:
    """Fits the host's time per layer and for the rest of a step, on steps whose kernels are too small to matter."""

    def alike(*, rotary: bool, moe: bool = False, compiled: bool = False) -> list[CaseSample]:
        chosen = [
            sample
            for sample in cases
            if sample.case.compile == compiled
            and (sample.case.model.moe is not None) == moe
            and (sample.case.model.positions == "rope") == rotary
        ]
        return sorted(chosen, key=lambda sample: sample.case.model.layers)

    few, *_, many = alike(rotary=True)
    layer = (many.step_seconds - few.step_seconds) / (many.case.model.layers - few.case.model.layers)
    rest = max(0.0, few.step_seconds - few.case.model.layers * layer)

    def of_layer(samples: list[CaseSample], less: float = 0.0) -> float:
        return max(0.0, (samples[-1].step_seconds - rest) / samples[-1].case.model.layers - less) if samples else 0.0

    host = {}
    for mode in MODES:
        host[mode] = of_layer(alike(rotary=False, compiled=mode == "compiled"))
        host[f"{mode} rotary"] = of_layer(alike(rotary=True, compiled=mode == "compiled"))
    host["mixture"] = of_layer(alike(rotary=True, moe=True), host["eager rotary"])
    return _changed(_own_changed(device, host_seconds=FrozenMapping(host)), step_seconds=rest)
