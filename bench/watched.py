"""Other frameworks' trainers, watched: predicted beside measured, and what watching costs.

    python bench/watched.py                      # a GPU: a Llama with 1.1 billion parameters
    python bench/watched.py --tiny --cluster laptop:1
    python bench/watched.py --again bench/results/watched-h200.json     # recorded memory, beside today's price; no GPU

Every case trains the same network twice, watched and not, and times the steps after the first ten by a clock of its
own: the ratio of the two is what watching costs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from shardwise.integrations.watch import RECORD

BEFORE = 10  # steps that are not timed


@dataclass(frozen=True)
class Sizes:
    """A Llama and its batch."""

    hidden: int = 2048
    layers: int = 16
    heads: int = 16
    vocab: int = 32_000
    seq: int = 2048
    rows: int = 4
    steps: int = 30


TINY = Sizes(hidden=64, layers=2, heads=4, vocab=256, seq=64, rows=2, steps=16)


@dataclass(frozen=True)
class Case:
    """How the network is trained, and by whom."""

    name: str
    framework: str
    weights: str = "float32"
    mixed: bool = True
    recompute: bool = False


CASES = (
    Case("Trainer, bf16", "huggingface"),
    Case("Trainer, bf16, checkpointing", "huggingface", recompute=True),
    Case("Trainer, bf16 weights", "huggingface", weights="bfloat16"),
    Case("Accelerate, bf16", "accelerate"),
    Case("Lightning, bf16-mixed", "lightning"),
)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random ones."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return self.sizes.rows * (self.sizes.steps + 1)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number >= len(self):
            raise IndexError(number)
        random = torch.Generator().manual_seed(number)
        tokens = torch.randint(self.sizes.vocab, (self.sizes.seq,), generator=random)
        return {"input_ids": tokens, "labels": tokens}


class Clock:
    """Seconds of a step, by waiting for the device twice in the whole run."""

    def __init__(self, steps: int) -> None:
        self.steps, self.began, self.seconds = steps, 0.0, 0.0

    def ended(self, step: int) -> None:
        if step not in (BEFORE, self.steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if step == BEFORE:
            self.began = now
        else:
            self.seconds = (now - self.began) / (self.steps - BEFORE)


def network(sizes: Sizes, case: Case, device: str | None = None) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocab, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.heads // 2,
        max_position_embeddings=sizes.seq,
    )  # fmt: skip
    with torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")):
        return LlamaForCausalLM(config).to(getattr(torch, case.weights))


def by_trainer(sizes: Sizes, case: Case, folder: Path, cluster: str | None, *, watched: bool) -> float:
    from shardwise.integrations.huggingface import ShardwiseCallback

    clock = Clock(sizes.steps)

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.ended(state.global_step)

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=sizes.steps, per_device_train_batch_size=sizes.rows,
        bf16=torch.cuda.is_available() and case.mixed, gradient_checkpointing=case.recompute, report_to=[],
        logging_steps=10, save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Trainer(network(sizes, case), arguments, train_dataset=Tokens(sizes), callbacks=[Timed()])
    if watched:
        ShardwiseCallback(cluster=cluster).attach(trainer)
    trainer.train()
    return clock.seconds


def by_accelerate(sizes: Sizes, case: Case, folder: Path, cluster: str | None, *, watched: bool) -> float:
    from accelerate import Accelerator

    from shardwise.integrations.accelerate import ShardwiseWatch

    clock = Clock(sizes.steps)
    cuda = torch.cuda.is_available()
    accelerator = Accelerator(mixed_precision="bf16" if cuda and case.mixed else "no", cpu=not cuda)
    model = network(sizes, case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loader = DataLoader(Tokens(sizes), batch_size=sizes.rows)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with contextlib.ExitStack() as stack:
        watch = None
        if watched:
            asked = ShardwiseWatch(
                accelerator, model, optimizer, loader, cluster=cluster, folder=folder / "shardwise", steps=sizes.steps
            )
            watch = stack.enter_context(asked)
        for step, batch in zip(range(1, sizes.steps + 1), loader, strict=False):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.step()
            clock.ended(step)
    accelerator.free_memory()
    return clock.seconds


def by_lightning(sizes: Sizes, case: Case, folder: Path, cluster: str | None, *, watched: bool) -> float:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch import Trainer as Lightning

    from shardwise.integrations.lightning import ShardwiseMonitor

    clock = Clock(sizes.steps)

    class Language(LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = network(sizes, case)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.network(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    class Timed(Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            clock.ended(trainer.global_step)

    callbacks: list[Any] = [Timed()]
    if watched:
        callbacks.append(ShardwiseMonitor(cluster=cluster, folder=folder / "shardwise"))
    cuda = torch.cuda.is_available()
    Lightning(
        accelerator="gpu" if cuda else "cpu", devices=1, precision="bf16-mixed" if cuda and case.mixed else "32-true",
        max_steps=sizes.steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks,
    ).fit(Language(), DataLoader(Tokens(sizes), batch_size=sizes.rows))  # fmt: skip
    return clock.seconds


TRAINED_BY = {"huggingface": by_trainer, "accelerate": by_accelerate, "lightning": by_lightning}


def measured(case: Case, sizes: Sizes, cluster: str | None) -> dict[str, Any]:
    """The record of the watched run, and the clock's seconds of both."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        train = TRAINED_BY[case.framework]
        watched = train(sizes, case, Path(name), cluster, watched=True)
        record = json.loads((Path(name) / "shardwise" / RECORD).read_text(encoding="utf-8"))
        clear_memory()
        alone = train(sizes, case, Path(name), cluster, watched=False)
        clear_memory()
    clocks = {"clock_seconds": alone, "watched_clock_seconds": watched}
    told = {key: record[key] for key in ("predicted", "measured", "versions", "notes")}
    return {"case": asdict(case), "sizes": asdict(sizes), **clocks, **told}


def priced_again(record: dict[str, Any]) -> float:
    """Bytes that a recorded run allocates by the cost model of today; the network has shapes, but no weights."""
    from shardwise.cost.memory.device import peak_memory
    from shardwise.cost.memory.room import allocated_bytes
    from shardwise.integrations.layout import job_of
    from shardwise.integrations.module import Sequences, module_facts
    from shardwise.spec.clusters import cluster_from

    sizes, case = Sizes(**record["sizes"]), Case(**record["case"])
    module = network(sizes, case, "meta")
    if case.recompute:
        module.gradient_checkpointing_enable()
    module.config.use_cache = case.framework != "huggingface"  # the Trainer turns it off
    loader = DataLoader(Tokens(sizes), batch_size=sizes.rows)
    cluster = cluster_from("dgx-h200:1").with_devices(1)
    optimizer, sequences = torch.optim.AdamW(module.parameters()), Sequences(sizes.seq, "given")
    job, _ = job_of(_layout(case, module, loader), module_facts(module), sequences, optimizer, cluster)
    return allocated_bytes(job, peak_memory(job))


def _layout(case: Case, module: Any, loader: Any) -> Any:
    """That of one GPU, as the framework's own objects say it."""
    if case.framework == "lightning":
        from lightning.pytorch.strategies import SingleDeviceStrategy

        from shardwise.integrations.lightning import strategy_layout

        said = SimpleNamespace(
            strategy=SingleDeviceStrategy("cpu"), precision="bf16-mixed", world_size=1, accumulate_grad_batches=1
        )
        return strategy_layout(said, module, loader)
    from shardwise.integrations.accelerate import layout_of

    state = SimpleNamespace(distributed_type="NO", mixed_precision="bf16", num_processes=1, parallelism_config=None)
    return layout_of(state, module, None, loader.batch_size, 1)


def print_again(path: Path) -> None:
    print("memory predicted today, measured")
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        held, used = priced_again(record), record["measured"]["memory_bytes"]
        print(f"{record['case']['name']:30} {held / 2**30:6.2f} GiB {used / 2**30:6.2f} GiB {used / held - 1:+6.1%}")


def clear_memory() -> None:
    """So that the next peak is the next run's own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def sizes_in(text: str) -> dict[str, int]:
    pairs = (one.partition("=") for one in text.split(",") if one)
    return {name: int(value) for name, _, value in pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a network for a CPU")
    parser.add_argument("--sizes", default="", help="other ones: hidden=3072,layers=10")
    parser.add_argument("--cluster", help="the machine; default: this one's GPUs")
    parser.add_argument("--only", choices=sorted(TRAINED_BY), help="one framework")
    parser.add_argument("--json", type=Path, help="a file for the records")
    parser.add_argument("--again", type=Path, help="a file of records: prices their memory again, and trains nothing")
    given = parser.parse_args()
    if given.again is not None:
        print_again(given.again)
        return
    sizes = replace(TINY if given.tiny else Sizes(), **sizes_in(given.sizes))
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    print(
        f"{device}, torch {torch.__version__}: predicted and measured step and memory; what watching costs by a clock"
    )
    records = []
    for case in (one for one in CASES if given.only in (None, one.framework)):
        found = measured(case, sizes, given.cluster)
        records.append(found)
        step, held = found["predicted"]["predicted_seconds"], found["predicted"]["tensor_bytes"]
        took, used = found["measured"]["step_seconds"], found["measured"]["memory_bytes"] or float("nan")
        cost = found["watched_clock_seconds"] / found["clock_seconds"] - 1
        print(
            f"{case.name:30} {1e3 * step:8.1f} ms {1e3 * took:8.1f} ms {took / step - 1:+6.1%}   "
            f"{held / 2**30:6.2f} GiB {used / 2**30:6.2f} GiB {used / held - 1:+6.1%}   "
            f"clock {1e3 * found['clock_seconds']:8.1f} ms, watched {cost:+5.1%}",
            flush=True,
        )
        if given.json is not None:
            given.json.write_text(json.dumps({"device": device, "records": records}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
