"""The method of fine-tuning is the first that fits, and the reason says what the others need."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.planner.advice.method import METHODS, ChosenMethod, choose_method
from shardwise.planner.request import Request
from shardwise.spec import Job
from shardwise.spec.errors import DoesNotFit


def chosen(model: str, cluster: Any, seq: int = 2048, **options: Any) -> ChosenMethod:
    training = {"seq": seq, "global_batch": 8, "task": "sft"}
    job = Job.from_dict({"model": model, "cluster": cluster, "training": training, "stack": "shardwise"})
    return choose_method(Request(job, any_priced=True, time_limit_seconds=10), **options)


def card(memory: str, count: int = 1) -> dict[str, Any]:
    peak = {"bf16": "100TFLOPS", "fp32": "50TFLOPS"}
    device = {"name": "card", "memory": memory, "memory_bandwidth": "1TB/s", "peak": peak, "vendor": "nvidia"}
    return {"device": device, "levels": [{"size": count, "link": "pcie-4"}]}


def test_all_weights_are_trained_where_they_fit() -> None:
    choice = chosen("llama3.2-1b", card("80GB"))
    assert choice.method == "full"
    assert "full fine-tuning fits" in choice.sentence()


def test_adapters_where_all_weights_do_not_fit() -> None:
    choice = chosen("llama3-8b", card("24GB"))
    assert choice.method in ("lora", "qlora")
    assert "full fine-tuning needs at least" in choice.sentence()
    assert choice.plan.best.job.training.adapters is not None


def test_a_quantised_base_where_nothing_else_fits() -> None:
    choice = chosen("llama3-8b", card("12GB"))
    assert choice.method == "qlora"
    assert choice.plan.best.job.training.base_precision == "nf4-double"
    assert [tried.method for tried in choice.tried] == list(METHODS)


@pytest.mark.slow
def test_seventy_billion_on_eight_small_cards() -> None:
    choice = chosen("llama3-70b", card("40GB", 8))
    assert choice.method in ("lora", "qlora")
    assert choice.plan.best.memory.total < 40e9


def test_what_never_fits_is_said_in_one_line() -> None:
    with pytest.raises(DoesNotFit, match="even QLoRA needs") as failure:
        chosen("llama3-405b", card("12GB"))
    assert "\n" not in str(failure.value)
