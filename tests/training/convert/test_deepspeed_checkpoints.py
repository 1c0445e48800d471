"""Checkpoints that DeepSpeed itself has saved: read as DeepSpeed reads them (`make test-frameworks`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.training.convert.deepspeed import deepspeed_weights
from shardwise.training.convert.weights import described, named_weights, torch_files

pytestmark = pytest.mark.frameworks

WORKER = Path(__file__).with_name("deepspeed_worker.py")
CONFIG = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 33, "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_zero_checkpoint_of_two_ranks(stage: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(WORKER), str(stage)]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    about = described(None, tmp_path)
    read = deepspeed_weights(tmp_path / "saved", about)
    own = named_weights(torch_files([tmp_path / "whole.pt"]), about, "DeepSpeed's own")
    assert read.step == 2
    assert read.tensors.keys() == own.tensors.keys()
    for name, one in own.tensors.items():
        assert torch.equal(read.tensors[name].read().float(), one.read().float()), name
