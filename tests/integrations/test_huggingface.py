"""A real `Trainer` in one process: what it is about to run is priced, logged, and refused where it has no price."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForSequenceClassification, Trainer, TrainingArguments

from integrations.tiny import CLUSTER, Examples, network
from shardwise.integrations.huggingface import ShardwiseCallback, _layout
from shardwise.interop.jobs import read_job
from shardwise.spec.errors import DoesNotFit, SpecError


def trainer(folder: Path, model: Any = None, data: Any = None, **changes: Any) -> Trainer:
    given: dict[str, Any] = {
        "max_steps": 6, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": [], "logging_steps": 2,
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(folder), **{**given, **changes})
    return Trainer(model=model or network(), args=arguments, train_dataset=data or Examples(), eval_dataset=Examples(8))


def test_the_run_is_priced_and_its_loggers_record_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    watched = trainer(tmp_path, gradient_checkpointing=True, optim="sgd", eval_strategy="steps", eval_steps=5)
    seen: list[dict[str, float]] = []

    class Logger(type(watched.callback_handler.callbacks[0])):  # type: ignore[misc]
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            seen.append(dict(logs))

    watched.add_callback(Logger())
    ShardwiseCallback(cluster=CLUSTER).attach(watched)
    watched.train()
    job = read_job(tmp_path / "shardwise" / "job.yaml")
    assert (job.strategy.recompute, job.training.optimizer, job.training.seq, job.run.steps) == ("full", "sgd", 16, 6)
    assert any("shardwise/step_seconds" in one and "shardwise/predicted_step_seconds" in one for one in seen)
    assert any("shardwise/step_seconds" in one for one in watched.state.log_history)
    said = capsys.readouterr().out
    assert "(the examples of the data set)" in said and "predicted beside measured, 6 steps" in said


@pytest.mark.slow
def test_a_second_run_in_the_folder_begins_anew(tmp_path: Path) -> None:
    for _ in range(2):
        watched = trainer(tmp_path, max_steps=2)
        watched.add_callback(ShardwiseCallback(cluster=CLUSTER))
        watched.train()
    lines = (tmp_path / "shardwise" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(one)["step"] for one in lines] == [1, 2]


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_record(tmp_path: Path) -> None:
    for steps, resumed in ((3, None), (5, True)):
        watched = trainer(tmp_path, max_steps=steps, save_strategy="steps", save_steps=3)
        watched.add_callback(ShardwiseCallback(cluster=CLUSTER))
        watched.train(resume_from_checkpoint=resumed)
    lines = (tmp_path / "shardwise" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(one)["step"] for one in lines] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_what_does_not_fit_is_warned_of_or_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"cluster": CLUSTER, "model": "llama3-8b", "seq": 512}
    watched = trainer(tmp_path / "stopped")
    watched.add_callback(ShardwiseCallback(**given, on_misfit="stop"))
    with pytest.raises(DoesNotFit, match=r"strategy: a device needs .* cpu has "):
        watched.train()
    assert watched.state.global_step == 0
    watched = trainer(tmp_path / "warned", max_steps=1)
    watched.add_callback(ShardwiseCallback(**given))
    watched.train()
    said = " ".join(capsys.readouterr().out.split())
    assert "does not fit (" in said and "the module has" in said and "a step had 64 tokens" in said


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: frozen(network()), "other parameters of its attention are trained"),
        (lambda: quantised(network()), "quantised by hqq are not priced"),
        (lambda: LlamaForSequenceClassification(network().config), "is not that of a language model"),
        (lambda: adapted(network()), "adapters of kind IA3 are not priced"),
    ],
)
def test_what_has_no_price_is_said_and_measured_alone(
    model: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = model()
    if type(network).__name__ == "LlamaForSequenceClassification":
        network.config.pad_token_id = 0
    data = Examples(8)
    callback = ShardwiseCallback(cluster=CLUSTER)
    from shardwise.integrations.layout import FrameworkRun, Ranks
    from shardwise.integrations.watch import RunWatch

    def run(folder: Path) -> FrameworkRun:
        ranks = Ranks(1, 1, torch.device("cpu"))
        return FrameworkRun("test", network, None, data, (), lambda: pytest.fail("read"), ranks, True, folder, 0, None)

    watch = RunWatch(run(tmp_path), callback.options)
    for step in (1, 2):
        watch.step_begins()
        watch.step_ends(step)
    watch.finish()
    record = json.loads((tmp_path / "shardwise.json").read_text(encoding="utf-8"))
    assert why in record["not_priced"] and record["predicted"] is None and record["measured"]["step_seconds"] > 0
    assert f"not priced: {record['not_priced']}" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SpecError, match="model: "):
        RunWatch(run(tmp_path), ShardwiseCallback(cluster=CLUSTER, on_misfit="stop").options)


def frozen(model: Any) -> Any:
    model.model.layers[0].self_attn.q_proj.requires_grad_(False)
    return model


def quantised(model: Any) -> Any:
    model.config.quantization_config = {"quant_method": "hqq"}
    return model


def adapted(model: Any) -> Any:
    model.peft_config = {"default": SimpleNamespace(peft_type="IA3")}
    return model


@pytest.mark.slow
def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r'^on_misfit: .* use "warn" or "stop"$'):
        ShardwiseCallback(on_misfit="fail")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"^seq: 0 is not a number of tokens"):
        ShardwiseCallback(seq=0)
    for changes, why in (
        ({}, "cluster: is not given, and PyTorch trains on a CPU here; .*calibrate"),
        ({"cluster": "dgx-h1000"}, "dgx-h1000"),
    ):
        watched = trainer(tmp_path)
        watched.add_callback(ShardwiseCallback(**changes))
        with pytest.raises(SpecError, match=why):
            watched.train()

    class Uneven(Examples):
        def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
            return {name: one[: 4 + number % 5] for name, one in super().__getitem__(number).items()}

    watched = trainer(tmp_path, data=Uneven())
    watched.add_callback(ShardwiseCallback(cluster=CLUSTER))
    with pytest.raises(SpecError, match="seq: is not given, and examples have 4 to 8 tokens"):
        watched.train()


@pytest.mark.slow
def test_a_compiled_network_is_priced_as_one(tmp_path: Path) -> None:
    watched = trainer(tmp_path, max_steps=2, torch_compile=True, torch_compile_backend="eager")
    watched.add_callback(ShardwiseCallback(cluster=CLUSTER))
    watched.train()
    job = read_job(tmp_path / "shardwise" / "job.yaml")
    assert job.stack.elementwise == "compiled" and job.stack.name == "accelerate-changed"


@pytest.mark.parametrize(
    ("setting", "changes"),
    [
        ({}, {}),
        ({"use_liger_kernel": True}, {"loss": "pieces", "norms": "fused", "gated_activation": "fused"}),
        ({"loss_type": "chunked_nll"}, {"loss": "pieces"}),
    ],
)
def test_losses_in_pieces_are_priced_as_they_are(
    setting: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    """Liger's fused linear cross entropy, and the one of TRL's SFTConfig."""
    watched = trainer(tmp_path)
    vars(watched.args).update(setting)
    layout = _layout(watched.args, watched.state, watched.model, watched.get_train_dataloader())
    assert layout.stack == changes
    assert any("Liger" in note for note in layout.notes) == ("use_liger_kernel" in setting)


@pytest.mark.slow
def test_sixteen_bit_weights_have_no_masters(tmp_path: Path) -> None:
    watched = trainer(tmp_path, model=network().bfloat16(), max_steps=1)
    watched.add_callback(ShardwiseCallback(cluster=CLUSTER))
    watched.train()
    job = read_job(tmp_path / "shardwise" / "job.yaml")
    assert (job.training.precision, job.training.optimizer) == ("bf16", "adamw-bf16-moments")
    assert (job.recipe.weight, job.recipe.gradient, job.recipe.master) == (2, 2, 0)
