"""What is read out of a launch script is what bash would give to Python."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from cli.running import error_line, run
from shardwise.interop.frameworks import TARGETS, read
from shardwise.interop.shell import MOST_CHARACTERS, Unset, python_command
from shardwise.interop.shell_words import Malformed

needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
ARRAYS = """#!/bin/bash
# Starts a run. Isn't it short?
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
NODES=${SLURM_NNODES:-"2"}
WORLD=$(($GPUS*$NODES)); HIDDEN=$((64 * 128))
DTYPE="fp8" ; SCRIPT=pretrain_gpt.py
LAUNCH=(
    --nproc_per_node $GPUS   # devices of a node
    --nnodes "$NODES"
)
MODEL=(--num-layers 32 --hidden-size $HIDDEN --ffn-hidden-size 14336
       --moe-layer-freq [0]*3+[1]*29 --untie-embeddings-and-output-weights)
EXTRA=()
if [[ "$DTYPE" == "fp8" ]] || [[ -z "$DTYPE" ]]; then
    EXTRA+=( "--fp8-format hybrid" "--fp8-amax-history-len 1024" )
elif [ $GPUS -gt 8 ]; then
    EXTRA+=(--never)
else
    EXTRA+=(--nor-this)
fi
MODEL+=("${EXTRA[@]}")
if [ ! -n "$DTYPE" ]; then MODEL=(); fi
case $DTYPE in
  bf16|fp16) MODEL+=(--bf16) ;;
  fp*) MODEL+=("--note" "two words") ;;
  *) MODEL+=(--none) ;;
esac
helper() { MODEL=(); }
for one in 1 2 3; do echo $one; done > /dev/null
EMPTY=()
PREFIX=""
$PREFIX torchrun "${LAUNCH[@]}" \\
    $SCRIPT \\
    ${MODEL[@]} "${EMPTY[@]}" \\
    --world ${WORLD} --text 'single $quoted' --joined a"b c"d --last "x$GPUS" 2>&1
"""
STRING = """
ARGS="--num-layers 24 \\
      --hidden-size 2048"
ARGS="$ARGS --seq-length 1024"
ARGS+=" --bf16"
torchrun --nproc_per_node 8 tools/train/pretrain_gpt.py $ARGS --lr 1e-4
"""


def by_bash(script: str, folder: Path) -> list[str]:
    """The words from the Python script on that bash gives to torchrun."""
    path = folder / "launch.sh"
    path.write_text("torchrun() { printf '%s\\0' \"$@\" >&3; }\n" + script, encoding="utf-8")
    command = ["bash", "-c", f"exec 3>&1 1>/dev/null; . {path}"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=True)
    words = done.stdout.split("\0")[:-1]
    return words[next(at for at, word in enumerate(words) if word.endswith(".py")) :]


@needs_bash
@pytest.mark.parametrize("script", [ARRAYS, STRING])
def test_a_script_is_read_as_bash_runs_it(script: str, tmp_path: Path) -> None:
    assert python_command(script) == by_bash(script, tmp_path)


@needs_bash
@pytest.mark.parametrize("seed", range(12))
def test_quotes_and_variables_are_those_of_bash(seed: int, tmp_path: Path) -> None:
    """Random assignments, arrays and expansions in all ways to quote them."""
    drawn = random.Random(seed)
    values = ["1", "a b", "", "x=y", "--opt 3", "it's", "5", " lead", "#c"]
    lines, scalars, arrays = [], [], []
    for number in range(8):
        if drawn.random() < 0.6 or not scalars:
            scalars.append(f"V{number}")
            value = drawn.choice(values).replace("'", "'\\''")
            lines.append(f"V{number}='{value}'")
        else:
            arrays.append(f"A{number}")
            inner = [
                drawn.choice([f'"${one}"', f"${one}", f"${{{one}:-7}}", "w"]) for one in drawn.choices(scalars, k=3)
            ]
            lines.append(f"A{number}=({' '.join(inner)})")
    words = []
    for _ in range(12):
        one = drawn.choice(scalars)
        words.append(
            drawn.choice([f"${one}", f'"${one}"', f"x${{{one}}}y", f'"${{{one}:-no}} z"', f"${{#{one}}}", "lit"])
        )
        if arrays:
            many = drawn.choice(arrays)
            words.append(
                drawn.choice([f"${{{many}[@]}}", f'"${{{many}[@]}}"', f'"${{{many}[*]}}"', f"${{#{many}[@]}}"])
            )
    script = "\n".join([*lines, f"torchrun train.py --begin {' '.join(words)}"])
    assert python_command(script) == by_bash(script, tmp_path)


def test_the_last_of_an_option_counts_as_in_argparse() -> None:
    read = TARGETS["megatron"].read("--micro-batch-size 1 --bf16 --micro-batch-size 4 --bf16")
    assert read.fields["strategy.microbatch"] == 4


def test_a_script_inside_of_a_command_or_a_here_document() -> None:
    quoted = 'ARGS=(--num-layers 2)\nsrun -l bash -c "cd /x; python -u y/pretrain_gpt.py ${ARGS[*]} --bf16" | tee log'
    assert python_command(quoted) == ["y/pretrain_gpt.py", "--num-layers", "2", "--bf16"]
    here = "N=4\nsbatch <<EOF\n#!/bin/bash\nsrun python pretrain_gpt.py --num-layers $N --bf16\nEOF\necho done"
    assert python_command(here) == ["pretrain_gpt.py", "--num-layers", "4", "--bf16"]


def test_what_comes_from_outside_is_known_to_be_unknown() -> None:
    script = "DATA=$1\nLAYERS=$(count layers)\npython train.py --data $DATA --num-layers $LAYERS --seq ${SEQ} $MORE"
    words = python_command(script)
    assert words[:3] == ["train.py", "--data", "$1"] and words[-3:] == ["--seq", "${SEQ}", "$MORE"]
    assert all(isinstance(one, Unset) for one in words[1:] if not one.startswith("--"))


@pytest.mark.parametrize("script", ["A=(1 2\npython x.py --a", "python x.py --a 'b", 'X="${A"', "if x; then y"])
def test_what_no_shell_takes_is_an_error_or_harmless(script: str) -> None:
    try:
        python_command(script)
    except Malformed as error:
        assert str(error)


def test_a_script_that_doubles_its_variables_is_refused() -> None:
    doubling = "A=aaaaaaaa\n" + "A=$A$A\n" * 60 + "python x.py --a $A"
    with pytest.raises(Malformed, match=f"{MOST_CHARACTERS:,} characters"):
        python_command(doubling)
    arrays = "A=('')\n" + 'A=("${A[@]}" "${A[@]}")\n' * 60 + "python x.py --a"
    with pytest.raises(Malformed, match="characters"):
        python_command(arrays)


SETTINGS = """
language_model: {num_layers: 24, hidden_size: 1024, num_attention_heads: 16, num_query_groups: null,
  ffn_hidden_size: null, add_bias_linear: False, activation_func: swiglu, num_moe_experts: null, fp8: null,
  attention_dropout: 0.0, hidden_dropout: 0.0}
model_parallel: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 2, sequence_parallel: True, bf16: True,
  fp16: False, timers: null}
micro_batch_size: 2
global_batch_size: 128
untie_embeddings_and_output_weights: True
position_embedding_type: rope
max_position_embeddings: 4096
seq_length: 4096
normalization: RMSNorm
vocab_size: 32000
lr: 2.5e-4
use_distributed_optimizer: True
check_for_nan_in_loss_and_grad: True
"""


def test_the_settings_of_yaml_cfg_are_options(tmp_path: Path) -> None:
    path = tmp_path / "gpt_config.yaml"
    path.write_text(SETTINGS, encoding="utf-8")
    fields = read(path).fields
    assert (fields["model.layers"], fields["model.activation"], fields["model.mlp_bias"]) == (24, "swiglu", False)
    assert (fields["strategy.tp"], fields["strategy.pp"], fields["strategy.zero"]) == (4, 2, 1)
    assert (fields["training.global_batch"], fields["training.precision"]) == (128, "bf16-fp32-grads")
    assert run("analyze", str(path), "--gpus", "16", "--json").status == 0


MEGATRON = """
BATCH=$1
ARGS=(--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
      --micro-batch-size 1 --bf16 --lr $LR --data-path $DATA)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}" --global-batch-size $BATCH $EXTRA
"""


def test_a_value_that_a_price_needs_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    path.write_text(MEGATRON, encoding="utf-8")
    line = error_line(run("analyze", str(path), "--gpus", "8"))
    assert "--global-batch-size: '$1' is set outside the script; set the variable in it" in line
    path.write_text(MEGATRON.replace("BATCH=$1", "BATCH=16"), encoding="utf-8")
    done = run("analyze", str(path), "--gpus", "8")
    assert done.status == 0, done.err
    assert "note: --lr = '$LR' is set outside the script: left out" in done.err
    path.write_text("source ./config.sh\nsbatch job.sh\n", encoding="utf-8")
    assert "gives no options to a Python script" in error_line(run("analyze", str(path), "--gpus", "8"))
