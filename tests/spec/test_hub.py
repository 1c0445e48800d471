"""Names that people type for models: which preset each means, and that none is guessed."""

from __future__ import annotations

from shardwise.interop.jobs import model_notes
from shardwise.spec import presets
from shardwise.spec.hub import is_hub_id, shape_words
from shardwise.spec.job import Job
from shardwise.spec.model import Model
from tables import table


@table(
    ("typed", "preset"),
    [
        ("Qwen/Qwen2.5-32B", "qwen2.5-32b"),
        ("qwen/qwen2.5-32b-instruct", "qwen2.5-32b"),
        ("Qwen2.5-32B", "qwen2.5-32b"),
        (" qwen-2.5-32b ", "qwen2.5-32b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama3.1-8b"),
        ("llama-3.1-8b", "llama3.1-8b"),
        ("llama3.1:8b", "llama3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama2-7b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3.1-70b"),
        ("mistralai/Mixtral-8x7B-v0.1", "mixtral-8x7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"),
        ("google/gemma-3-27b-it", "gemma3-27b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-32B", "qwen2.5-32b"),
        ("Qwen/Qwen3-4B-Instruct-2507", "qwen3-4b"),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507", "qwen3-235b-a22b"),
        ("allenai/OLMo-2-1124-7B-SFT", "olmo2-7b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("moonshotai/Kimi-K2-Thinking", "kimi-k2"),
        # Its vocabulary is another than that of the base model: an id comes before a variant.
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", "mixtral-8x22b-instruct"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("openai-community/gpt2", "gpt2"),
        ("TINY", "tiny"),
    ],
)
def test_a_name_means_the_preset_of_its_shape(typed: str, preset: str) -> None:
    assert presets.preset_name("model", typed) == preset
    assert presets.load("model", Model, typed.strip()).name == preset


@table(
    "typed",
    [
        "Qwen/Qwen2.5-33B", "qwen3-70b", "llama-3.1-80b", "meta-llama/Llama-3-18b",  # sizes that there are not
        "Qwen/Qwen2.5-7B-Instruct-1M", "Qwen/Qwen2.5-VL-7B-Instruct", "Qwen/Qwen3-Embedding-0.6B",  # other models
        "meta-llama/Llama-3.2-11B-Vision", "meta-llama/Llama-Guard-3-8B", "deepseek-ai/DeepSeek-V3.2-Exp",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",  # its head is not tied, that of Qwen2.5 is
        "mistralai/Mistral-Small-Instruct-2409", "mistralai/Mistral-Large-Instruct-2601",  # dates without a size
        "somebody/Qwen2.5-7B", "Qwen/Qwen2.5-7B-AWQ", "models/Qwen2.5-7B", "/Qwen/Qwen2.5-7B", "./Qwen/Qwen2.5-7B",
        "Qwen2.5", "instruct", "-", "", "qwen 2.5 7b", "Qwen/Qwen2.5-7B/",
    ],
)  # fmt: skip
def test_no_name_is_guessed(typed: str) -> None:
    assert presets.preset_name("model", typed) is None


def test_every_id_means_its_own_preset_and_no_two_shapes_share_a_name() -> None:
    for name, path in presets._files("model").items():
        hub = presets._ids(name)
        assert all(is_hub_id(one) and presets.preset_name("model", one) == name for one in hub), name
        assert presets.preset_name("model", name.upper()) == name
        assert name == path.stem or name.startswith(f"{path.stem}-")
    words = [shape_words(name) for name in presets.names("model")]
    assert len(set(words)) == len(words) - 1  # mixtral-8x22b-instruct, above


@table(
    ("one", "other"),
    [
        ("Llama-3.1-8B", "Llama-31-8B"),
        ("Llama-3.1-8B", "Llama-3-18B"),
        ("qwen3-0.6b", "qwen30-6b"),
        ("mistral-7b-v0.1", "mistral-7b-v0.2"),
        ("mixtral-8x7b", "mixtral-8-7b"),
        ("Mistral-Small-2409", "Mistral-Small-2501"),
    ],
)
def test_names_of_other_shapes_have_other_words(one: str, other: str) -> None:
    assert shape_words(one) != shape_words(other)


@table("text", ["Qwen/Qwen2.5-32B", "01-ai/Yi-6B", "a/b"])
def test_ids_of_the_hub(text: str) -> None:
    assert is_hub_id(text)


@table(
    "text",
    ["llama3-8b", "a/b.yaml", "a/b.JSON", "a/b/c", "../b", "/b", "a/", "~/b", "a\\b/c", "a/b c", "a/" + "b" * 300],
)
def test_what_is_no_id(text: str) -> None:
    assert not is_hub_id(text)


@table(
    ("typed", "alone"),
    [
        ("google/gemma-3-27b-it", True),
        ("gemma-3-4b", True),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", True),
        ("mistralai/Mistral-Small-24B-Instruct-2501", False),
        ("google/gemma-3-1b-it", False),
        ("google/gemma-2-27b-it", False),
    ],
)
def test_a_note_says_where_a_preset_is_the_language_model_alone(typed: str, alone: bool) -> None:
    assert [note.endswith("its language model alone") for note in model_notes(typed)] == [alone]


def test_a_job_keeps_the_name_of_the_preset() -> None:
    job = Job.from_dict({"model": "Qwen/Qwen2.5-32B", "cluster": "dgx-h100", "strategy": {"tp": 8}})
    assert job.to_dict()["model"] == "qwen2.5-32b"
