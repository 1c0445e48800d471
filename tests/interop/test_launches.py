"""Launch scripts: what they start, on how many devices; a configuration that they name is followed. Nothing is run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from cli.running import error_line, run
from shardwise.api.given import arguments_of
from shardwise.api.inputs import decided_job
from shardwise.interop.frameworks import READERS
from shardwise.interop.kinds import configuration_in
from shardwise.interop.launches import launch_of
from shardwise.spec.errors import SpecError
from shardwise.spec.job import Job

PROGRAMS = tuple(program for reader in READERS.values() for program in reader.programs)
HOSTS = "# two hosts\nnode1 slots=8\nnode2 slots=4\n"

# A script, then its nodes, devices of a node and devices.
SIZES: list[tuple[str, tuple[int | None, int | None, int | None]]] = [
    ("torchrun --nnodes 4 --nproc_per_node=8 train.py", (4, 8, 32)),
    ("torchrun --nnodes=1:4 --nproc-per-node 8 train.py", (4, 8, 32)),
    ("torchrun train.py", (1, 1, 1)),
    ("python -m torch.distributed.run --nnodes 2 --nproc_per_node 4 -m my.train", (2, 4, 8)),
    ("NNODES=2; GPUS=${GPUS:-8}\ntorchrun --nnodes $NNODES --nproc_per_node ${GPUS} train.py", (2, 8, 16)),
    ("accelerate launch --num_machines 2 --num_processes $((2 * 8)) train.py --lr 1", (2, 8, 16)),
    ("deepspeed --num_gpus 4 train.py", (None, 4, 4)),
    ("deepspeed --num_nodes=2 --num_gpus 4 train.py", (2, 4, 8)),
    ("deepspeed --hostfile hosts train.py", (2, 8, 12)),
    ("deepspeed --hostfile hosts --include node1:0,1@node2:0,3 train.py", (2, 2, 4)),
    ("deepspeed --include localhost:0,1,2 train.py", (1, 3, 3)),
    ("mpirun -np 16 --map-by ppr:8:node python train.py", (None, 8, 16)),
    ("mpirun --hostfile hosts -N 4 python train.py", (2, 4, 8)),
    ("#SBATCH -N 4\n#SBATCH --gpus-per-node=8\ntorchrun --nnodes $SLURM_NNODES --nproc_per_node 8 t.py", (4, 8, 32)),
    ("#SBATCH -N 2\n#SBATCH --gres=gpu:a100:4\n#SBATCH --ntasks-per-node=4\nsrun python train.py", (2, 4, 8)),
    ("#SBATCH -N 2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=h100:8\nsrun python train.py", (2, 8, 16)),
    ("srun -N4 --gpus-per-node=8 bash -c 'axolotl train x.yml'", (4, 8, 32)),
    ("#SBATCH --nodes=2\nsrun -n 16 python train.py", (2, 8, 16)),
    ("tune run --nproc_per_node 8 lora_finetune_distributed --config x.yaml", (None, 8, 8)),
    ("NNODES=2 NPROC_PER_NODE=8 llamafactory-cli train x.yaml", (2, 8, 16)),
    ("CUDA_VISIBLE_DEVICES=0,1 axolotl train x.yml", (None, 2, 2)),
    ("if [ -z $HERE ]; then N=2; else N=9; fi\ntorchrun --nnodes $N --nproc_per_node 8 t.py", (2, 8, 16)),
    ("sbatch --nodes=2 --gpus-per-node=8 inner.sh", (2, 8, 16)),
    ("python train.py", (None, None, None)),
]  # fmt: skip


def beside(name: str) -> str | None:
    return {"hosts": HOSTS, "inner.sh": "srun python train.py"}.get(name)


@pytest.mark.parametrize(("script", "size"), SIZES, ids=[script for script, _ in SIZES])
def test_the_size_is_that_of_the_launcher(script: str, size: tuple[int | None, ...]) -> None:
    launch = launch_of(script, PROGRAMS, beside)
    assert launch is not None and (launch.nodes, launch.node_devices, launch.devices) == size


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("torchrun --nnodes $WORLD --nproc_per_node 8 t.py", "--nnodes $WORLD is set outside"),
        ("accelerate launch --num_processes $(count) t.py", "--num_processes $(count) is set outside"),
        ("deepspeed --hostfile none.txt t.py", "--hostfile none.txt is not beside the script"),
    ],
)
def test_a_size_that_is_not_in_the_script_is_said(script: str, why: str) -> None:
    launch = launch_of(script, PROGRAMS, beside)
    assert launch is not None and launch.devices is None and why in launch.unknown


def test_settings_are_read_as_text_and_outside_ones_are_named() -> None:
    launch = launch_of(
        "A=4\ntorchrun --nproc_per_node 8 train.py --config c.yaml --per-device $A --flag -x 1 model.dtype=bf16 "
        "+new.key='[1, 2]' --lr $LR",
        PROGRAMS,
    )
    assert launch is not None and launch.files == ("c.yaml",) and launch.outside == ("lr",)
    assert launch.settings == {"per_device": 4, "flag": True, "x": 1, "model.dtype": "bf16", "new.key": [1, 2]}


AXOLOTL = "base_model: llama3-8b\nsequence_len: 2048\nadapter: lora\nlora_target_linear: true\nbf16: true\n"
FILES = {
    "configs/ax.yml": AXOLOTL,
    "lf.yaml": "model_name_or_path: llama3-8b\nfinetuning_type: lora\ncutoff_len: 1024\nbf16: true\n",
    "sft.yaml": "model_name_or_path: llama3-8b\nmax_length: 2048\ndataset_name: mine\n",
    "tune.yaml": "model: {_component_: torchtune.models.llama3.llama3_8b}\ntokenizer: {max_seq_len: 2048}\n",
    "lit.yaml": "checkpoint_dir: llama3-8b\nlora_r: 8\ntrain: {micro_batch_size: 1, max_seq_length: 512}\n",
    "titan.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 4096\n',
    "neox/one.yml": "num-layers: 12\nhidden-size: 768\nnum-attention-heads: 12\npos-emb: rotary\nseq-length: 2048\n"
                    "model-parallel-size: 2\npipe-parallel-size: 1\ntrain_micro_batch_size_per_gpu: 4\n",
    "fsdp.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n",
}  # fmt: skip

# A script, the devices, and fields of the job.
FOLLOWED: list[tuple[str, int, dict[str, Any]]] = [
    ("#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nC=configs/ax.yml\nsrun axolotl train $C --micro-batch-size 3",
     8, {"strategy.microbatch": 3, "cluster.nodes": 2}),
    ("accelerate launch --num_processes 4 -m axolotl.cli.train configs/ax.yml", 4, {"training.seq": 2048}),
    ("NPROC_PER_NODE=8 llamafactory-cli train lf.yaml cutoff_len=4096", 8, {"training.seq": 4096}),
    ("accelerate launch --config_file fsdp.yaml scripts/sft.py --config sft.yaml --max_length 512", 8,
     {"strategy.zero": 3, "training.seq": 512}),
    ("trl sft --model_name_or_path llama3-8b --max_length 512 --use_peft --num_processes 2", 2, {"training.seq": 512}),
    ("tune run --nnodes 2 --nproc_per_node 8 full_finetune_distributed --config tune.yaml tokenizer.max_seq_len=4096",
     16, {"training.seq": 4096, "strategy.zero": 3}),
    ("litgpt finetune_lora --config lit.yaml --train.micro_batch_size 2 --devices 2", 2, {"strategy.microbatch": 2}),
    ("torchrun --nproc_per_node 8 -m torchtitan.train --job.config_file titan.toml --training.seq_len 8192", 8,
     {"training.seq": 8192}),
    ("python ./deepy.py train.py -d neox one.yml", 0, {"strategy.tp": 2}),
]  # fmt: skip


def made(folder: Path, script: str, **values: Any) -> tuple[Job, list[str]]:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "launch.sh").write_text(script + "\n")
    return decided_job(arguments_of(values, str(folder / "launch.sh")))


@pytest.mark.parametrize(("script", "devices", "expected"), FOLLOWED, ids=[script for script, *_ in FOLLOWED])
def test_a_configuration_that_a_script_starts_is_followed(
    tmp_path: Path, script: str, devices: int, expected: dict[str, Any]
) -> None:
    job, notes = made(tmp_path, script, **({} if devices else {"gpus": 8}))
    assert job.cluster.devices == (devices or 8)
    for path, value in expected.items():
        owner: Any = job
        for part in path.split("."):
            owner = getattr(owner, part)
        assert owner == value, path
    assert any("file (recognised by" in note for note in notes)


def test_devices_that_are_given_count_for_more_than_the_script(tmp_path: Path) -> None:
    script = "axolotl train configs/ax.yml --launcher torchrun -- --nproc_per_node=4"
    assert made(tmp_path, script)[0].cluster.devices == 4
    assert made(tmp_path, script, gpus=16)[0].cluster.devices == 16
    assert made(tmp_path, script, cluster="dgx-a100")[0].cluster.devices == 4
    assert made(tmp_path, script, cluster="dgx-a100:2")[0].cluster.devices == 16


def test_what_cannot_be_resolved_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--nnodes \$N is set outside"):
        made(tmp_path, "torchrun --nnodes $N --nproc_per_node 8 sft.py --config sft.yaml")
    (tmp_path / "launch.sh").write_text("axolotl train nowhere.yml\n")
    assert "nowhere.yml" in error_line(run("analyze", str(tmp_path / "launch.sh"), "--gpus", "8"))


def test_a_script_of_megatron_gives_its_devices(tmp_path: Path) -> None:
    script = tmp_path / "pretrain.sh"
    script.write_text(
        "torchrun --nproc_per_node 8 --nnodes ${NNODES:-2} pretrain_gpt.py --num-layers 4 --hidden-size 512 "
        "--num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 "
        "--global-batch-size 32 --vocab-size 32000 --bf16 --tensor-model-parallel-size 2\n"
    )
    job, notes = decided_job(arguments_of({}, str(script)))
    assert (job.cluster.devices, job.strategy.tp, job.strategy.data_parallel) == (16, 2, 8)
    assert "the script starts 16 processes on 2 nodes" in notes


def test_nothing_in_a_script_is_run_and_a_hostile_one_is_a_line(tmp_path: Path) -> None:
    """Pieces of scripts put together at random: read, or refused in one line, and quickly."""
    mark = tmp_path / "was-run"
    pieces = [
        f"touch {mark}", f"$(touch {mark})", f"`touch {mark}`", "torchrun", "--nnodes", "--nproc_per_node=8",
        "$((1/0))", "train.py", "--config", "sft.yaml", "configs/ax.yml", "/etc/passwd", "../../../etc/passwd", "a=b=c",
        "eval", "bash -c '", "'", '"', "<<EOF",
        "\n", ";", "axolotl train", "x.yml", "--hostfile", "\0", "#SBATCH --nodes=999999999999", "${X:-${Y:-$X}}",
        "--include", "@:@,", "-d", "--hostfile=",
        "--config", "--config-name", "=", "-n", "-N", "srun", "mpirun", "read",
        "-m", "llamafactory-cli", "[[", "{1..9}", "é" * 50, "deepspeed", "sbatch launch.sh",
    ]  # fmt: skip
    drawn = random.Random(7)
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for _ in range(500):
        text = " ".join(drawn.choices(pieces, k=drawn.randint(1, 14)))
        launch_of(text, PROGRAMS, lambda name: HOSTS if drawn.random() < 0.3 else None)
        try:
            found = configuration_in(text, "launch.sh", tmp_path)
            assert isinstance(found, str) or found.read().fields
        except SpecError as error:
            assert "\n" not in str(error)
    assert not mark.exists()


def test_a_script_gives_its_words_in_the_ways_of_published_ones(tmp_path: Path) -> None:
    """A command in single quotes for every task, options that `read` takes from a here-document, a folder by `$(cd`."""
    sbatch = "#SBATCH --nodes=4\nL='torchrun --nproc_per_node 8 --nnodes '$SLURM_NNODES\n" \
             "C='t.py --config x.yaml'\nsrun bash -c '$L $C'"  # fmt: skip
    launch = launch_of(sbatch)
    assert launch is not None and (launch.devices, launch.files) == (32, ("x.yaml",))
    read = "read -r -d '' words <<EOF\nopenrlhf.cli.train_sft \\\n  --max_len 2048\nEOF\n" \
           "deepspeed --num_gpus 8 --module $words"  # fmt: skip
    launch = launch_of(read)
    assert launch is not None and (launch.program, launch.settings) == ("openrlhf.cli.train_sft", {"max_len": 2048})
    folder = 'H=$(cd -- "$(dirname -- "$0")" && pwd)\nN="--nnodes 1 --node_rank $RANK"\n' \
             "torchrun --nproc_per_node 2 $N $H/run_train.py --config-file $H/sft.yaml"  # fmt: skip
    launch = launch_of(folder)
    assert launch is not None and launch.devices == 2 and launch.program.endswith("/run_train.py")
    assert made(tmp_path, folder)[0].training.seq == 2048
