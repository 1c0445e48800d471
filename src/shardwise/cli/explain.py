"""`shardwise explain`: one formula with the numbers filled in, and its source."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shardwise.api import bare
from shardwise.api.quantities import amount
from shardwise.cli.arguments import add_job_arguments, job_arguments
from shardwise.cli.explain_network import collective, one_message, topic_parser
from shardwise.cli.inputs import job_from, model_from, whole_number
from shardwise.cli.output import show
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Device

if TYPE_CHECKING:
    from shardwise.report.explain.explanation import Explanation

_EXAMPLES = """
shardwise explain allreduce --topology torus --n 64 --size 1GiB --bandwidth 50GB/s --latency 2us
shardwise explain zero --params 7.5e9 --dp 64
shardwise explain activations --model llama3-8b --seq 8192 --tp 2
"""


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    topic, *rest = arguments
    explanation, parsed = _topic(topic)(topic, rest)
    show(parsed, explanation.page, explanation.to_dict)
    return 0


def _overview() -> str:
    lines = "\n".join(f"  {name:<12} {what}" for name, (_, what) in TOPICS.items())
    return (
        "usage: shardwise explain TOPIC [options]\n\nOne formula with the numbers put in, and its source.\n\n"
        f"{lines}\n"
        "  a collective: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather, scatter\n\n"
        f"examples:{_EXAMPLES.replace(chr(10), chr(10) + '  ').rstrip()}\n"
    )


def _topic(name: str) -> Callable[[str, list[str]], tuple[Explanation, argparse.Namespace]]:
    if name in TOPICS:
        return TOPICS[name][0]
    from shardwise.collectives import CollectiveKind

    try:
        CollectiveKind.parse(name)
    except SpecError:
        known = [*TOPICS, *(kind.value.replace("_", "-") for kind in CollectiveKind)]
        raise SpecError(
            "", f"unknown topic {shown(name)}", nearest_name(name, known) or "see `shardwise explain --help`"
        ) from None
    return collective


def _zero(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.report.explain.memory import explain_zero
    from shardwise.spec.parameters import parameter_count
    from shardwise.spec.training import Training

    parser = topic_parser(topic, "Model states of one device under ZeRO.", _EXAMPLES.splitlines()[2])
    parser.add_argument("--params", help="parameters (default 7.5e9, as in the paper)")
    parser.add_argument("--model", help="take the parameters of a model")
    parser.add_argument("--dp", default="64", help="devices that share the states")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--optimizer", default="adamw")
    parsed = parser.parse(arguments)
    checked = Training(precision=parsed.precision, optimizer=parsed.optimizer)
    if parsed.model:
        parameters: float = parameter_count(model_from(parsed.model))
    else:
        parameters = amount(parsed.params or "7.5e9", "count", "--params", "7.5e9")
    if parameters >= 1e18:
        raise SpecError("--params", f"{shown(parsed.params)} is out of range", "use a number such as 7.5e9")
    return explain_zero(parameters, whole_number(parsed.dp, "--dp"), checked.precision, checked.optimizer), parsed


def _flops(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.report.explain.compute import explain_flops

    parser = topic_parser(
        topic,
        "Training FLOPs by every published convention.",
        "shardwise explain flops --model gpt3-175b --tokens 300B",
    )
    parser.add_argument("--model", default="gpt3-175b")
    parser.add_argument("--seq", default="2048")
    parser.add_argument("--tokens", default="300B", help="tokens trained on")
    parser.add_argument("--device", default="a100-80gb")
    parsed = parser.parse(arguments)
    tokens = amount(parsed.tokens, "count", "--tokens", "300B")
    device = presets.resolve("device", Device, parsed.device)
    return explain_flops(model_from(parsed.model), whole_number(parsed.seq, "--seq"), tokens, device), parsed


def _bubble(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.report.explain.compute import explain_bubble

    parser = topic_parser(
        topic, "Pipeline bubble of every schedule.", "shardwise explain bubble --pp 8 --microbatches 32 --interleave 2"
    )
    parser.add_argument("--pp", default="8", help="stages")
    parser.add_argument("--microbatches", default="32")
    parser.add_argument("--interleave", default="2", help="chunks per rank")
    parser.add_argument("--schedule", help="draw the timeline of this one")
    parsed = parser.parse(arguments)
    numbers = [whole_number(getattr(parsed, name), f"--{name}") for name in ("pp", "microbatches", "interleave")]
    return explain_bubble(*numbers, drawn=parsed.schedule), parsed


def _mfu(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.cost.analysis import analyze
    from shardwise.cost.compute.flops import recomputed_flops_per_token
    from shardwise.report.explain.compute import explain_mfu

    parser = topic_parser(
        topic,
        "Utilisation from a measured step time.",
        "shardwise explain mfu --step-seconds 60s --model llama3-8b --cluster dgx-h100:2 --batch 1024 --seq 8192",
    )
    add_job_arguments(parser)
    parser.add_argument("--step-seconds", default="10s", help="measured time of one step")
    parsed = _with_job_defaults(parser.parse(arguments), {})
    seconds = amount(parsed.step_seconds, "seconds", "--step-seconds", "12s")
    job = job_from(parsed)
    analysis = analyze(job)
    strategy = job.strategy
    again = recomputed_flops_per_token(job.model, job.training.seq, strategy.recompute, job.recomputed_operators)
    return explain_mfu(job, seconds, analysis.flops_per_step(), again * job.tokens_per_step), parsed


def _scaling(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.report.explain.compute import explain_scaling

    example = "shardwise explain scaling --n 8 --t1 10s --strong 1.5s --weak 11s"
    parser = topic_parser(topic, "Scaling efficiency from measured step times.", example)
    parser.add_argument("--n", default="8", help="how many times as many devices")
    parser.add_argument("--t1", default="10s", help="step on the smaller machine")
    parser.add_argument("--strong", default="1.5s", help="step on the larger machine with the same batch")
    parser.add_argument("--weak", default="11s", help="step on the larger machine with n times the batch")
    parsed = parser.parse(arguments)
    times = [amount(getattr(parsed, name), "seconds", f"--{name}", "10s") for name in ("t1", "strong", "weak")]
    return explain_scaling(whole_number(parsed.n, "--n"), *times), parsed


_DEFAULTS: dict[str, dict[str, str]] = {
    "activations": {"strategy.tp": "1"},
    "tp": {"strategy.tp": "8"},
    "dp": {"strategy.zero": "1"},
    "pp": {"strategy.pp": "2"},
    "cp": {"strategy.cp": "2"},
    "ep": {"strategy.ep": "8", "model": "mixtral-8x7b"},
}


def _with_job_defaults(parsed: argparse.Namespace, defaults: dict[str, str]) -> argparse.Namespace:
    """A complete small job behind every topic, so that `explain tp` alone already shows numbers."""
    usual: dict[str, Any] = {"training.seq": "4096", "training.global_batch": "64"}
    given = job_arguments(parsed)
    if not parsed.job and not bare.gives_model(given):
        usual["model"] = defaults.get("model", "llama3-8b")
    if not parsed.job and not bare.gives_cluster(given):
        usual["cluster"] = "dgx-h100:2"
    usual |= {name: value for name, value in defaults.items() if name != "model"}
    for name, value in usual.items():
        if not parsed.job and getattr(parsed, name) is None:
            setattr(parsed, name, value)
    return parsed


def _activations(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.report.explain.memory import explain_activations

    parser = topic_parser(topic, "What a layer keeps for its backward pass.", _EXAMPLES.splitlines()[3])
    add_job_arguments(parser)
    parsed = _with_job_defaults(parser.parse(arguments), _DEFAULTS[topic])
    return explain_activations(job_from(parsed)), parsed


def _dimension(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.cost.analysis import analyze
    from shardwise.report.explain.dimension import explain_dimension

    parser = topic_parser(
        topic,
        f"What {topic} sends in one step of a job.",
        f"shardwise explain {topic} --model llama3-70b --cluster dgx-h100:8",
    )
    add_job_arguments(parser)
    parsed = _with_job_defaults(parser.parse(arguments), _DEFAULTS[topic])
    return explain_dimension(topic, analyze(job_from(parsed))), parsed


TOPICS: dict[str, tuple[Callable[[str, list[str]], tuple[Explanation, argparse.Namespace]], str]] = {
    "p2p": (one_message, "one message over one link"),
    "zero": (_zero, "model states under ZeRO 0 to 3"),
    "activations": (_activations, "what a layer keeps for its backward pass, tensor by tensor"),
    "flops": (_flops, "training FLOPs by every published convention"),
    "mfu": (_mfu, "model and hardware FLOPs utilisation of a measured step"),
    "bubble": (_bubble, "the pipeline bubble of every schedule"),
    "scaling": (_scaling, "strong and weak scaling efficiency"),
    "tp": (_dimension, "what tensor parallelism sends"),
    "dp": (_dimension, "what data parallelism and ZeRO send"),
    "pp": (_dimension, "what pipeline parallelism sends"),
    "cp": (_dimension, "what context parallelism sends"),
    "ep": (_dimension, "what expert parallelism sends"),
}
