"""A rank of a Hugging Face `Trainer` under DeepSpeed on a CPU, watched; one stage of ZeRO for each process.

DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node 2 deepspeed_worker.py FOLDER STAGE
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from accelerate import PartialState
from transformers import Trainer, TrainingArguments

from integrations.tiny import Examples, network
from shardwise.integrations.huggingface import ShardwiseCallback

AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Kept(ShardwiseCallback):
    """Keeps what was priced after the run."""

    def on_train_end(self, *given: object, **more: object) -> None:
        self.job = self.watch.priced.job.to_dict()  # type: ignore[union-attr]
        super().on_train_end(*given, **more)


def main(folder: Path, stage: int) -> None:
    # Without a GPU the arguments would begin a state of one process: this one has them all, over gloo.
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    state = PartialState(backend="gloo")
    config = {
        **dict.fromkeys(AUTO, "auto"), "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10_000},
    }  # fmt: skip
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True, seed=1, deepspeed=config,
        accelerator_config={"use_configured_state": True},
    )  # fmt: skip
    trainer = Trainer(model=network(), args=arguments, train_dataset=Examples())
    callback = Kept(cluster=f"laptop:{state.num_processes}").attach(trainer)
    trainer.train()
    facts = {"job": callback.job, "engine": type(trainer.model_wrapped).__name__}
    (folder / f"rank-{state.process_index}.json").write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
