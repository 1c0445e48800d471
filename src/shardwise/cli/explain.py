"""`shardwise explain`: one formula with the numbers filled in, and its source."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.api.bare import DEFAULT_LATENCY, bare_cluster
from shardwise.api.quantities import amount, exclusive, whole_number
from shardwise.cli.arguments import add_field_argument, add_job_arguments, job_arguments, job_from
from shardwise.cli.output import add_output_arguments, show
from shardwise.cli.parser import Parser
from shardwise.interop.jobs import model_from
from shardwise.report.console import versioned
from shardwise.spec import presets
from shardwise.spec.bare import BareNumbers
from shardwise.spec.errors import SpecError, nearest_name, shown
from shardwise.spec.hardware import Device
from shardwise.spec.network import Link

if TYPE_CHECKING:
    from shardwise.collectives import CollectiveKind, Topology
    from shardwise.report.explain.explanation import Explanation

_FIRST = "--model --cluster --gpus --tp --pp --dp --cp --zero --global-batch --seq"  # of a topic with a job

_Flag = tuple[str, str | None, str]


@dataclass(frozen=True)
class Topic:
    line: str
    """In the overview."""
    does: str
    """In its help."""
    example: str
    explained: Callable[[str, argparse.Namespace], Explanation]
    """Called with the name of the topic and the parsed flags."""
    fields: tuple[_Flag, ...] = ()
    """Flags of a job that it takes without a job behind it: name, default, and what follows their help."""
    more: tuple[_Flag, ...] = ()
    """Flags of its own: name, default and help."""
    job: Mapping[str, str] | None = None
    """Defaults of the job behind it, by the attribute of their flag; None if it needs no job."""


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0
    parsed, explanation = explained(arguments)
    show(parsed, explanation.page, lambda: versioned("explain", explanation.to_dict()))
    return 0


def explained(arguments: list[str]) -> tuple[argparse.Namespace, Explanation]:
    """The parsed options of a topic, and its explanation."""
    name, *rest = arguments
    topic = _topic(name)
    parser = Parser(f"explain {name}", topic.does, topic.example, "" if topic.job is None else _FIRST)
    add_output_arguments(parser)
    if topic.job is not None:
        add_job_arguments(parser)
    for flag, default, more in topic.fields:
        add_field_argument(parser, flag, more, default)
    for flag, default, text in topic.more:
        parser.add_argument(flag, default=default, help=text if default is None else f"{text} (default {default})")
    parsed = parser.parse(rest)
    if topic.job is not None:
        _take_job_defaults(parsed, topic.job)
    return parsed, topic.explained(name, parsed)


def _overview() -> str:
    lines = "\n".join(f"  {name:<17} {topic.line}" for name, topic in TOPICS.items())
    examples = "\n".join(f"  {topic.example}" for topic in (_COLLECTIVE, TOPICS["zero"], TOPICS["activations"]))
    return (
        "usage: shardwise explain TOPIC [options]\n\nOne formula with the numbers put in, and its source.\n\n"
        f"{lines}\n"
        "  a collective: all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce, gather, scatter\n\n"
        f"examples:\n{examples}\n"
    )


def _topic(name: str) -> Topic:
    if name in TOPICS:
        return TOPICS[name]
    from shardwise.collectives import CollectiveKind

    try:
        CollectiveKind.parse(name)
    except SpecError:
        known = [*TOPICS, *(kind.value.replace("_", "-") for kind in CollectiveKind)]
        raise SpecError(
            "", f"unknown topic {shown(name)}", nearest_name(name, known) or "see `shardwise explain --help`"
        ) from None
    return _COLLECTIVE


def _take_job_defaults(parsed: argparse.Namespace, defaults: Mapping[str, str]) -> None:
    """Completes the flags to a small job, so that `explain tp` alone shows numbers."""
    usual: dict[str, Any] = {"training.seq": "4096", "training.global_batch": "64"}
    given = job_arguments(parsed).bare
    if not parsed.job and not given.given("model"):
        usual["model"] = defaults.get("model", "llama3-8b")
    if not parsed.job and not given.given("cluster"):
        usual["cluster"] = "dgx-h100:2"
    usual |= {name: value for name, value in defaults.items() if name != "model"}
    for name, value in usual.items():
        if not parsed.job and getattr(parsed, name) is None:
            setattr(parsed, name, value)


def _collective(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.collectives import CollectiveKind
    from shardwise.report.explain.collective import explain_collective

    kind = CollectiveKind.parse(name)
    topology, usual = _topology(parsed, kind)
    size = amount(parsed.size, "bytes", "--size", "1GiB", zero=True)
    return explain_collective(kind, size, topology, parsed.algorithm or usual)


def _topology(parsed: argparse.Namespace, kind: CollectiveKind) -> tuple[Topology, str]:
    """The network asked for, and its default algorithm: the textbook's on a topology, the cheapest on a cluster."""
    from shardwise.layout.network import network
    from shardwise.spec.clusters import cluster_from

    if parsed.cluster:
        if parsed.topology:
            raise exclusive("--cluster", parsed.cluster, "--topology")
        cluster = cluster_from(parsed.cluster)
        if parsed.gpus:
            cluster = cluster.with_devices(whole_number(parsed.gpus, "--gpus"))
        return network(cluster), "auto"
    parsed.topology = parsed.topology or "ring"
    if parsed.gpus is None and parsed.shape is None:
        parsed.gpus = "2" if kind.value == "send_recv" else "8"
    parsed.bandwidth = parsed.bandwidth or ("450GB/s,50GB/s" if parsed.topology == "hierarchical" else "50GB/s")
    names = ("topology", "gpus", "gpus_per_node", "shape", "bandwidth", "latency")
    return network(bare_cluster(BareNumbers(**{name: getattr(parsed, name) for name in names}))), "textbook"


def _one_message(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.collective import explain_message

    if parsed.bandwidth or parsed.latency:
        given = {"bandwidth": parsed.bandwidth or "50GB/s", "latency": parsed.latency or DEFAULT_LATENCY}
        return explain_message(parsed.size, Link.from_dict({"name": "given", **given}))
    return explain_message(parsed.size, presets.resolve("link", Link, parsed.link or "infiniband-ndr"))


def _zero(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.device import explain_zero
    from shardwise.spec.parameters import parameter_count
    from shardwise.spec.training import Training

    checked = Training(precision=parsed.precision, optimizer=parsed.optimizer)
    if parsed.model:
        parameters: float = parameter_count(model_from(parsed.model))
    else:
        parameters = amount(parsed.params or "7.5e9", "count", "--params", "7.5e9")
    if parameters >= 1e18:
        raise SpecError("--params", f"{shown(parsed.params)} is out of range", "use a number such as 7.5e9")
    return explain_zero(parameters, whole_number(parsed.dp, "--dp"), checked.precision, checked.optimizer)


def _activations(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.device import explain_activations

    return explain_activations(job_from(parsed))


def _flops(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.device import explain_flops

    tokens = amount(parsed.tokens, "count", "--tokens", "300B")
    device = presets.resolve("device", Device, parsed.device)
    return explain_flops(model_from(parsed.model), whole_number(parsed.seq, "--seq"), tokens, device)


def _mfu(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.cost.analysis import analyze
    from shardwise.cost.compute.flops import recomputed_flops_per_token
    from shardwise.report.explain.device import explain_mfu

    seconds = amount(parsed.step_seconds, "seconds", "--step-seconds", "12s")
    job = job_from(parsed)
    analysis = analyze(job)
    strategy = job.strategy
    again = recomputed_flops_per_token(job.model, job.training.seq, strategy.recompute, job.recomputed_operators)
    return explain_mfu(job, seconds, analysis.flops_per_step(), again * job.tokens_per_step)


def _bubble(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.device import explain_bubble

    numbers = [whole_number(getattr(parsed, flag), f"--{flag}") for flag in ("pp", "microbatches", "interleave")]
    return explain_bubble(*numbers, drawn=parsed.schedule)


def _scaling(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.device import explain_scaling

    times = [amount(getattr(parsed, flag), "seconds", f"--{flag}", "10s") for flag in ("t1", "strong", "weak")]
    return explain_scaling(whole_number(parsed.factor, "--factor"), *times)


def _dimension(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.cost.analysis import analyze
    from shardwise.report.explain.dimension import explain_dimension

    return explain_dimension(name, analyze(job_from(parsed)))


def _parameter_server(name: str, parsed: argparse.Namespace) -> Explanation:
    from shardwise.report.explain.dimension import explain_parameter_server

    job = job_from(parsed)
    servers = None if parsed.servers is None else whole_number(parsed.servers, "--servers")
    return explain_parameter_server(job, servers)


def _sent(name: str, line: str, job: Mapping[str, str]) -> Topic:
    model = "mixtral-8x7b" if name == "ep" else "llama3-70b"
    example = f"shardwise explain {name} --model {model} --cluster dgx-h100:8"
    return Topic(line, f"What {name} sends in one step of a job.", example, _dimension, job=job)


# fmt: off
_COLLECTIVE = Topic(
    "", "A collective on a topology, or on a cluster of the catalogue.",
    "shardwise explain allreduce --topology torus --gpus 64 --size 1GiB --bandwidth 50GB/s --latency 2us", _collective,
    (
        ("--topology", None, "; ring by default"), ("--gpus", None, ""), ("--shape", None, "; widths of a hierarchy"),
        ("--gpus-per-node", None, "; the width of the inner level of a hierarchy"),
        ("--bandwidth", None, ""), ("--latency", None, ""), ("--cluster", None, "; in place of a topology"),
    ),
    (
        ("--size", "1GiB", "bytes to send; the whole buffer"),
        ("--algorithm", None, "algorithm of this collective; its name, textbook or auto"),
    ),
)
TOPICS = {
    "p2p": Topic(
        "one message over one link", "One message over one link.",
        "shardwise explain p2p --size 64MiB --link infiniband-ndr", _one_message,
        (("--bandwidth", None, "; in place of a link"), ("--latency", None, "; in place of a link")),
        (("--size", "64MiB", "bytes to send"), ("--link", None, "link preset or file (default infiniband-ndr)")),
    ),
    "zero": Topic(
        "model states under ZeRO 0 to 3", "Model states of one device under ZeRO.",
        "shardwise explain zero --params 7.5e9 --dp 64", _zero,
        (("--params", None, " (default 7.5e9, as in the paper)"), ("--model", None, "; whose parameters are taken"),
         ("--dp", "64", "; devices that share the states"), ("--precision", "bf16", ""), ("--optimizer", "adamw", "")),
    ),
    "activations": Topic(
        "what a layer keeps for its backward pass, tensor by tensor", "What a layer keeps for its backward pass.",
        "shardwise explain activations --model llama3-8b --seq 8192 --tp 2", _activations, job={"strategy.tp": "1"},
    ),
    "flops": Topic(
        "training FLOPs by every published convention", "Training FLOPs by every published convention.",
        "shardwise explain flops --model gpt3-175b --tokens 300B", _flops,
        (("--model", "gpt3-175b", ""), ("--seq", "2048", ""), ("--device", "a100-80gb", "")),
        (("--tokens", "300B", "tokens of the whole run"),),
    ),
    "mfu": Topic(
        "model and hardware FLOPs utilisation of a measured step", "Utilisation from a measured step time.",
        "shardwise explain mfu --step-seconds 60s --model llama3-8b --cluster dgx-h100:2 --global-batch 1024", _mfu,
        more=(("--step-seconds", "10s", "measured time of one step"),), job={},
    ),
    "bubble": Topic(
        "the pipeline bubble of every schedule", "Pipeline bubble of every schedule.",
        "shardwise explain bubble --pp 8 --microbatches 32 --interleave 2", _bubble,
        (("--pp", "8", ""), ("--interleave", "2", ""), ("--schedule", None, "; the one whose timeline is drawn")),
        (("--microbatches", "32", "microbatches per step"),),
    ),
    "scaling": Topic(
        "strong and weak scaling efficiency", "Scaling efficiency from measured step times.",
        "shardwise explain scaling --factor 8 --t1 10s --strong 1.5s --weak 11s", _scaling,
        more=(
            ("--factor", "8", "how many times as many devices"), ("--t1", "10s", "step on the smaller machine"),
            ("--strong", "1.5s", "step on the larger machine with the same batch"),
            ("--weak", "11s", "step on the larger machine with as many times the batch"),
        ),
    ),
    "parameter-server": Topic(
        "parameter servers beside an all-reduce", "What parameter servers send and wait for, beside an all-reduce.",
        "shardwise explain parameter-server --model llama3-8b --cluster dgx-h100:8", _parameter_server,
        more=(("--servers", None, "servers that share the weights (default: 1 up to one for each worker)"),), job={},
    ),
    "tp": _sent("tp", "what tensor parallelism sends", {"strategy.tp": "8"}),
    "dp": _sent("dp", "what data parallelism and ZeRO send", {"strategy.zero": "1"}),
    "pp": _sent("pp", "what pipeline parallelism sends", {"strategy.pp": "2"}),
    "cp": _sent("cp", "what context parallelism sends", {"strategy.cp": "2"}),
    "ep": _sent("ep", "what expert parallelism sends", {"strategy.ep": "8", "model": "mixtral-8x7b"}),
}
WHAT = tuple(TOPICS)
