"""Every model of the catalogue has the parameters that its publisher printed."""

from __future__ import annotations

import re

from shardwise.spec import presets
from shardwise.spec.model import Model
from shardwise.spec.parameters import active_parameter_count, parameter_count
from tables import table

NAMES = presets.names("model")
SCALES = {"M": 10**6, "B": 10**9, "T": 10**12}


def rounds_to(count: int, printed: str) -> bool:
    """Whether ``count`` rounds to exactly the digits of, say, ``"174.6B"``."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?([MBT])", printed)
    assert match, printed
    digits = len(match[2] or "")
    return f"{count / SCALES[match[3]]:.{digits}f}{match[3]}" == printed


@table("name", NAMES)
def test_parameters_are_the_published_ones(name: str) -> None:
    model = presets.load("model", Model, name)
    published, count = model.published_parameters, parameter_count(model)
    if isinstance(published, int):
        assert count == published
    else:
        assert published and rounds_to(count, published), f"{count:,} is not {published}"


@table("name", NAMES)
def test_entry_has_its_own_name_and_says_its_source(name: str) -> None:
    model = presets.load("model", Model, name)
    assert model.name == name
    assert re.search(r"arXiv \d{4}\.\d{5}|[\w-]+/[\w.-]+ ", model.source), model.source


@table("name", NAMES)
def test_entry_survives_the_round_trip(name: str) -> None:
    model = presets.load("model", Model, name)
    assert Model.from_dict(model.to_dict()) == model


@table(
    ("name", "printed"),
    [
        ("mixtral-8x7b", "12.9B"),  # arXiv 2401.04088 section 2.1: "13B active"; 12.9B at mistral.ai
        ("mixtral-8x22b", "39B"),  # mistral.ai, "39B active parameters out of 141B"
        ("qwen3-30b-a3b", "3.35B"),  # model card: 3.3B activated, cut off rather than rounded
        ("qwen3-235b-a22b", "22B"),  # model card: 22B activated
        ("deepseek-v2", "21B"),  # arXiv 2405.04434: 21B activated
    ],
)
def test_active_parameters_are_the_printed_ones(name: str, printed: str) -> None:
    count = active_parameter_count(presets.load("model", Model, name))
    assert rounds_to(count, printed), f"{count:,} is not {printed}"


def test_the_prediction_module_completes_the_checkpoint_of_deepseek() -> None:
    """DeepSeek-R1 has V3's shape; its checkpoint also stores the module's copies of embedding and head."""
    model = presets.load("model", Model, "deepseek-v3")
    copies = 2 * model.vocab * model.hidden
    assert parameter_count(model, with_prediction_modules=True) + copies == 684_489_845_504
