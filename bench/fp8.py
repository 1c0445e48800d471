"""FP8 on one GPU: `check` against float64; time `casts`, `linear` layers and a training `step`.

python bench/fp8.py check|casts|linear|grouped
python bench/fp8.py step bf16 fp8 [--layers 8] [--batch 2] [--recompute full] [--optimizer adamw] [--profile fp8]
python bench/fp8.py gradients fp8 [--layers 2]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.engine import engine as engine_module
from shardwise.engine.batch import Batch
from shardwise.engine.fp8.linear import ScaledProducts, fp8_cast, fp8_largest, product
from shardwise.engine.fp8.scaling import Form, cast, format_of, whole_matrix
from shardwise.spec.job import Job

SCALINGS = ("tensor", "row", "block")
TOKENS = 16384
CLUSTER = {"device": "h200-sxm", "levels": [{"size": 1, "link": "nvlink-4"}]}
# Llama-3 8B: inputs, outputs of the layers that read one input together.
SHAPES = {"query, key, value": (4096, (4096, 1024, 1024)), "output": (4096, (4096,)),
          "gate, up": (4096, (14336, 14336)), "down": (14336, (4096,))}  # fmt: skip


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def milliseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, end = event(), event()
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(statistics.median(times))


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def check() -> None:
    """The kernels bit by bit against the plain casts; outputs and gradients against float64."""
    for scaling in SCALINGS:
        for stacked in (False, True):
            for shapes in ([(512, 384), (512, 1024)], [(272, 48)]):
                parts = [random(*(shape[::-1] if stacked else shape), scale=3.0 + n) for n, shape in enumerate(shapes)]
                matrix = whole_matrix(parts, stacked)
                largest = []
                if scaling == "row":
                    largest = list(fp8_largest(parts, stacked))
                    sizes = matrix.float().abs()
                    assert torch.equal(largest[0], sizes.amax(1)) and torch.equal(largest[1], sizes.amax(0))
                elif scaling == "tensor":
                    largest = [matrix.abs().amax().float()]
                for gradient in (False, True):
                    found = fp8_cast(parts, largest, scaling, gradient, stacked, True, True)
                    ways = ((matrix, (largest * 2)[:1]), (matrix.T, (largest * 2)[1:2]))
                    for one, (wide, most) in enumerate(ways):
                        expected = cast(wide, most[0] if most else None, scaling, format_of(scaling, gradient), stacked)
                        form = Form(found[2 * one], found[2 * one + 1], stacked and scaling == "block")
                        other = (form.values.float() != expected.values.float()).float().mean().item()
                        apart = error(form.wide(), expected.wide().double())
                        print(f"cast {scaling} stacked={stacked} gradient={gradient} turned={one}: "
                              f"{other:.2%} of values differ, {apart:.1e} apart")  # fmt: skip
    for scaling in SCALINGS:
        hidden = random(2, 512, 1024)
        weights = [random(width, 1024, scale=0.03) for width in (1536, 256)]
        gradients = [random(2, 512, width, scale=1e-3) for width in (1536, 256)]
        products = ScaledProducts(scaling)
        for cached in (True, False):
            for compiled in (False, True) if cached else (False,):
                inputs = hidden.clone().requires_grad_()
                trained = [one.clone().requires_grad_() for one in weights]
                forms = [one.detach() for one in products.weight_forms(weights)] if cached else None
                torch._dynamo.reset()
                call = torch.compile(products.__call__, fullgraph=True) if compiled else products
                outputs = call(inputs, trained, forms)
                torch.autograd.backward(outputs, gradients)
                wide = hidden.double().flatten(0, 1)
                flat = [one.double().flatten(0, 1) for one in gradients]
                of_hidden = torch.stack([one @ weight.double() for one, weight in zip(flat, weights)]).sum(0)
                errors = [error(one.flatten(0, 1), wide @ weight.double().T) for one, weight in zip(outputs, weights)]
                assert inputs.grad is not None
                errors.append(error(inputs.grad.flatten(0, 1), of_hidden))
                errors += [error(one.grad, other.T @ wide) for one, other in zip(trained, flat) if one.grad is not None]
                print(f"{scaling} cached={cached} compiled={compiled}: outputs, input and weight gradients",
                      " ".join(f"{one:.2%}" for one in errors))  # fmt: skip


def casts() -> None:
    matrix = random(TOKENS, 14336)
    elements = matrix.numel()
    print(f"bf16 copy {milliseconds(lambda: matrix.clone()):.3f} ms")
    for scaling in SCALINGS:
        largest = [matrix.abs().amax().float()]
        largest = {"tensor": largest, "row": list(fp8_largest([matrix], False)), "block": []}[scaling]
        for plain, turned in ((True, True), (True, False), (False, True)):
            for stacked in (False, True):
                taken = milliseconds(partial(fp8_cast, [matrix], largest, scaling, False, stacked, plain, turned))
                moved = elements * (2 + plain + turned)
                print(f"{scaling} plain={plain} turned={turned} stacked={stacked}: {taken:.3f} ms, "
                      f"{moved / taken / 1e9:.2f} TB/s")  # fmt: skip
    print(f"largest of rows and columns {milliseconds(lambda: fp8_largest([matrix], False)):.3f} ms")
    print(f"largest of all {milliseconds(lambda: torch.linalg.vector_norm(matrix, torch.inf)):.3f} ms")


def matmuls() -> None:
    """Bare matmuls of FP8 forms, by what they accumulate in."""
    for rows, inner, columns in ((TOKENS, 4096, 14336), (TOKENS, 4096, 28672), (TOKENS, 14336, 4096),
                                 (TOKENS, 4096, 4096), (TOKENS, 4096, 1024), (TOKENS, 28672, 4096),
                                 (14336, TOKENS, 4096), (28672, TOKENS, 4096), (4096, TOKENS, 4096)):  # fmt: skip
        left, right = random(rows, inner), random(columns, inner, scale=0.02)
        flops = 2 * rows * inner * columns
        plain = milliseconds(lambda: left @ right.T)  # noqa: B023
        line = f"{rows} x {inner} x {columns}: bf16 {flops / plain / 1e9:.0f}"
        for scaling in SCALINGS:
            for fast in (True, False) if scaling != "block" else (False,):
                for square in (True, False) if scaling == "block" else (False,):
                    for dtype in (torch.bfloat16, torch.float32) if not fast else (torch.bfloat16,):
                        try:
                            forms = []
                            for one, stacked in ((left, False), (right, square)):
                                most = {"tensor": [one.abs().amax().float()], "block": []}.get(scaling)
                                most = list(fp8_largest([one], stacked)) if most is None else most
                                form = fp8_cast([one], most, scaling, False, stacked, True, False)
                                forms.append(Form(form[0], form[1], stacked))
                            taken = milliseconds(lambda: product(forms[0], forms[1], dtype, fast))  # noqa: B023
                            name = f"{scaling}{' fast' if fast else ''}{' square' if square else ''}"
                            line += f", {name} {str(dtype)[-7:]} {flops / taken / 1e9:.0f}"
                        except Exception as failure:
                            line += f", {scaling} {dtype}: {str(failure).splitlines()[0][:150]}"
        print(line, "TFLOP/s", flush=True)


def linear() -> None:
    matmuls()
    for name, (inner, widths) in SHAPES.items():
        hidden = random(TOKENS, inner).requires_grad_()
        weights = [random(width, inner, scale=0.02).requires_grad_() for width in widths]
        gradients = [random(TOKENS, width, scale=1e-3) for width in widths]

        def plain() -> None:
            torch.autograd.grad([torch.nn.functional.linear(hidden, one) for one in weights],  # noqa: B023
                                [hidden, *weights], gradients)  # noqa: B023  # fmt: skip

        wide = milliseconds(plain)
        line = f"{name}: forward and backward, bf16 {wide:.3f} ms"
        for scaling in SCALINGS:
            products = ScaledProducts(scaling)
            try:
                forms = [one.detach() for one in products.weight_forms(weights)]

                def narrow() -> None:
                    outputs = products(hidden, weights, forms)  # noqa: B023
                    torch.autograd.grad(outputs, [hidden, *weights], gradients)  # noqa: B023

                taken = milliseconds(narrow)
                line += f", {scaling} {taken:.3f} ({wide / taken:.2f}x)"
            except Exception as failure:
                line += f", {scaling}: {str(failure).splitlines()[0][:150]}"
        print(line, flush=True)


# Routed experts: of a mixture, their number, the rows that 8,192 tokens send them, inputs and outputs of each.
EXPERTS = {"Mixtral 8x7B, up": (8, 16384, 4096, 14336), "Mixtral 8x7B, down": (8, 16384, 14336, 4096),
           "Qwen3-30B-A3B, up": (128, 65536, 2048, 768), "Qwen3-30B-A3B, down": (128, 65536, 768, 2048)}  # fmt: skip

ROWS_COMPARED = 2048


def cast_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    values, scales, *_ = fp8_cast([rows], list(fp8_largest([rows], False)), "row", False, False, True, False)
    return values, scales


def cast_experts(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """In plain PyTorch, with a scale for every output; stored so that sums lie along rows."""
    turned = matrices.mT.contiguous().float()
    scales = turned.abs().amax(-1) / 448
    return (turned / scales[..., None]).to(torch.float8_e4m3fn).mT, scales


def grouped_fp8(rows: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor], ends: Tensor) -> Tensor:
    functions: Any = torch.nn.functional
    by_row = functions.ScalingType.RowWise
    product: Tensor = functions.scaled_grouped_mm(
        rows[0], matrices[0], rows[1], by_row, matrices[1], by_row, offs=ends, use_fast_accum=True
    )
    return product


def grouped() -> None:
    """Matmuls of experts by a scale per row, with the cast of their rows, beside bf16: output and input gradient.

    Weights are cast once a step, which is timed apart. The gradient of the weights adds along the rows of an expert,
    whose number is no multiple of 16, as FP8 wants it: it would stay in bf16.
    """
    for name, (experts, count, inner, columns) in EXPERTS.items():
        matrices = random(experts, inner, columns, scale=0.02)
        counts = torch.multinomial(torch.ones(experts), count, replacement=True).bincount(minlength=experts)
        ends = counts.cumsum(0).to("cuda", torch.int32)
        for what, width, weight in (("output", inner, matrices), ("input gradient", columns, matrices.mT)):
            rows = random(count, width)
            multiply = partial(torch.nn.functional.grouped_mm, rows, weight, offs=ends)
            wide, expected = milliseconds(multiply), multiply()[:ROWS_COMPARED].double()
            try:
                narrow, given = cast_experts(weight), cast_rows(rows)
                off = error(grouped_fp8(given, narrow, ends)[:ROWS_COMPARED], expected)
                bare, casting = (milliseconds(one) for one in (partial(grouped_fp8, given, narrow, ends),
                                                               partial(cast_rows, rows)))  # fmt: skip
                print(f"{name}, {what}: bf16 {wide:.3f} ms, fp8 {bare:.3f} and casts {casting:.3f} "
                      f"({wide / (bare + casting):.2f}x), {off:.2%} apart; casting the weights, in plain PyTorch, "
                      f"{milliseconds(partial(cast_experts, weight)):.3f}", flush=True)  # fmt: skip
            except Exception as failure:
                print(f"{name}, {what}: bf16 {wide:.3f} ms, fp8: {str(failure).splitlines()[0][:300]}", flush=True)


def world_of_one() -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)


def job_of(given: argparse.Namespace, precision: str, batch: int, seq: int, **model: Any) -> Job:
    shape = {"name": "bench", "activation": "swiglu", "norm": "rmsnorm", "positions": "rope", "max_seq": seq, **model}
    training = {"precision": precision, "seq": seq, "global_batch": batch, "compile": not given.eager,
                "optimizer": given.optimizer, "graphs": False if given.no_graphs else "auto"}  # fmt: skip
    strategy = {"microbatch": batch, "recompute": given.recompute}
    return Job.from_dict({"model": shape, "cluster": CLUSTER, "training": training, "strategy": strategy})


def initialise(stages: Any, model: Any, seed: int) -> None:
    """On the GPU, which is faster; small numbers in the last layers would be better, but take no other time."""
    torch.manual_seed(0)
    for stage in stages:
        for one in stage.parameters():
            one.data.fill_(1.0) if one.dim() == 1 else one.data.normal_(std=0.02)


def step(given: argparse.Namespace) -> None:
    """Milliseconds of a whole step of the engine: sequences of 8192 tokens through layers of Llama-3 8B."""
    world_of_one()
    for precision in given.precisions:
        try:
            one_step(given, precision)
        except Exception as failure:
            print(f"{precision}: {type(failure).__name__}: {str(failure)[:1500]}", flush=True)
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def one_step(given: argparse.Namespace, precision: str) -> None:
    setattr(engine_module, "initialise_parts", initialise)  # noqa: B010
    job = job_of(given, precision, given.batch, 8192, hidden=4096, layers=given.layers, heads=32, kv_heads=8,
                 ffn=14336, vocab=128256)  # fmt: skip
    engine = engine_module.Engine(job, device="cuda")
    torch.manual_seed(1)
    tokens = torch.randint(128256, (given.batch, 8193), device="cuda")
    batch = Batch.of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    losses, times = [], []
    for _ in range(given.steps):
        start, end = event(), event()
        start.record()
        result = engine.step(batch)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
        losses.append(float(result.loss))
    times = times[-(given.steps * 3 // 4) :]
    memory = torch.cuda.max_memory_allocated() / 1e9
    print(f"{precision}, {given.layers} layers, {given.batch} x 8192, recompute {given.recompute}, {given.optimizer}: "
          f"{statistics.median(times):.1f} ms ({min(times):.1f} to {max(times):.1f}), {memory:.1f} GB, losses",
          " ".join(f"{one:.4f}" for one in losses), flush=True)  # fmt: skip
    print(f"{precision}: CUDA graphs {engine.graphs.reason or 'used'}", flush=True)
    if precision in given.profile:
        print_kernels(lambda: engine.step(batch))


def gradients(given: argparse.Namespace) -> None:
    """How far every gradient of one step is from that of bf16, from the same weights: by norm, and by direction."""
    world_of_one()
    expected: dict[str, Tensor] = {}
    for precision, eager in [("bf16", True), *((one, eager) for one in given.precisions for eager in (True, False))]:
        setattr(engine_module, "initialise_parts", initialise)  # noqa: B010
        given.eager = eager
        job = job_of(given, precision, 1, 4096, hidden=4096, layers=given.layers, heads=32, kv_heads=8, ffn=14336,
                     vocab=32768)  # fmt: skip
        engine = engine_module.Engine(job, device="cuda")
        torch.manual_seed(1)
        tokens = torch.randint(32768, (1, 4097), device="cuda")
        loss = float(engine.forward_backward(Batch.of(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())))
        found = {one.name: engine.gradient(one) for one in engine.parameters}
        held = {name: one.float() for name, one in found.items() if one is not None}
        expected = expected or held
        off = {name: error(one, expected[name].double()) for name, one in held.items()}
        worst = sorted(off.items(), key=lambda one: -one[1])[:4]
        same = {name: float(torch.cosine_similarity(one.flatten(), expected[name].flatten(), 0))
                for name, one in held.items()}  # fmt: skip
        print(f"{precision} {'eager' if eager else 'compiled'}: loss {loss:.5f}, {len(held)} gradients, median "
              f"{statistics.median(off.values()):.2%} off, least cosine {min(same.values()):.4f}, worst",
              ", ".join(f"{name} {one:.1%}" for name, one in worst), flush=True)  # fmt: skip
        del engine, found, held
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()


def print_kernels(run: Callable[[], Any], times: int = 2, most: int = 24) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in events) / times / 1000
    print(f"kernels of a step: {total:.1f} ms")
    for one in events[:most]:
        print(f"{one.self_device_time_total / times / 1000:8.2f} ms {one.count // times:5d} x {one.key[:120]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("check", "casts", "linear", "grouped", "step", "gradients"))
    parser.add_argument("precisions", nargs="*", default=["bf16", "fp8", "fp8-rowwise", "fp8-blockwise"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recompute", default="none")
    parser.add_argument("--profile", nargs="*", default=[], metavar="PRECISION")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--no-graphs", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.what in ("step", "gradients"):
        {"step": step, "gradients": gradients}[given.what](given)
    else:
        {"check": check, "casts": casts, "linear": linear, "grouped": grouped}[given.what]()


if __name__ == "__main__":
    main()
