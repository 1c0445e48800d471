"""`shardwise explain`, what is sent: a collective on a network, one message over a link."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from shardwise.api import bare
from shardwise.api.quantities import amount
from shardwise.cli.arguments import Parser, bare_numbers
from shardwise.cli.inputs import whole_number
from shardwise.cli.output import add_output_arguments
from shardwise.spec import presets
from shardwise.spec.errors import SpecError, shown
from shardwise.spec.network import Link

if TYPE_CHECKING:
    from shardwise.collectives import CollectiveKind, Topology
    from shardwise.report.explain.explanation import Explanation

_EXAMPLE = "shardwise explain allreduce --topology torus --n 64 --size 1GiB --bandwidth 50GB/s --latency 2us"


def topic_parser(topic: str, description: str, example: str) -> Parser:
    """A parser with the flags that every topic has."""
    parser = Parser(f"explain {topic}", description, example)
    add_output_arguments(parser)
    return parser


def collective(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    from shardwise.collectives import CollectiveKind
    from shardwise.report.explain.collective import explain_collective

    parser = topic_parser(topic, "A collective on a topology, or on a cluster of the catalogue.", _EXAMPLE)
    parser.add_argument("--topology", help=", ".join(bare.TOPOLOGIES))
    parser.add_argument("--n", "--gpus", dest="gpus", help="ranks")
    parser.add_argument("--shape", help="axes of a mesh or torus, widths of a hierarchy: 8x8")
    parser.add_argument("--gpus-per-node", help="width of the inner level of a hierarchy")
    parser.add_argument("--size", default="1GiB", help="bytes of the whole buffer")
    parser.add_argument("--bandwidth", help="one direction, per level: 50GB/s or 450GB/s,50GB/s")
    parser.add_argument("--latency", help="per message, per level: 2us or 2us,5us")
    parser.add_argument("--cluster", help="a cluster in place of a topology: dgx-h100:4")
    parser.add_argument("--algorithm", help="one algorithm, textbook or auto")
    parsed = parser.parse(arguments)
    kind = CollectiveKind.parse(topic)
    topology, usual = _topology(parsed, kind)
    size = amount(parsed.size, "bytes", "--size", "1GiB", zero=True)
    return explain_collective(kind, size, topology, parsed.algorithm or usual), parsed


def _topology(parsed: argparse.Namespace, kind: CollectiveKind) -> tuple[Topology, str]:
    """The network asked for, and the algorithm people expect on it: the textbook's, or the cluster's cheapest."""
    from shardwise.cost.traffic.network import network
    from shardwise.spec.clusters import cluster_from

    if parsed.cluster:
        if parsed.topology:
            raise SpecError(
                "--cluster", f"{shown(parsed.cluster)} and --topology are mutually exclusive", "give one of them"
            )
        cluster = cluster_from(parsed.cluster)
        if parsed.gpus:
            cluster = cluster.with_devices(whole_number(parsed.gpus, "--n"))
        return network(cluster), "auto"
    parsed.topology = parsed.topology or "ring"
    if parsed.gpus is None and parsed.shape is None:
        parsed.gpus = "2" if kind.value == "send_recv" else "8"
    parsed.bandwidth = parsed.bandwidth or ("450GB/s,50GB/s" if parsed.topology == "hierarchical" else "50GB/s")
    parsed.device = None
    return network(bare.cluster(bare_numbers(parsed))), "textbook"


def one_message(topic: str, arguments: list[str]) -> tuple[Explanation, argparse.Namespace]:
    """One message over one link."""
    from shardwise.collectives import p2p_latency
    from shardwise.report.explain.explanation import Explanation
    from shardwise.report.explain.quantity import Quantity, rate, seconds, size
    from shardwise.spec.units import readable_bytes

    parser = topic_parser(
        topic, "One message over one link.", "shardwise explain p2p --size 64MiB --link infiniband-ndr"
    )
    parser.add_argument("--size", default="64MiB")
    parser.add_argument("--link", help="link preset or file")
    parser.add_argument("--bandwidth", help="in place of a link")
    parser.add_argument("--latency", help="in place of a link")
    parsed = parser.parse(arguments)
    if parsed.bandwidth or parsed.latency:
        given = {"bandwidth": parsed.bandwidth or "50GB/s", "latency": parsed.latency or bare.DEFAULT_LATENCY}
        link = Link.from_dict({"name": "given", **given})
    else:
        link = presets.resolve("link", Link, parsed.link or "infiniband-ndr")
    cost = p2p_latency(parsed.size, link)
    sent = float(cost.volume.sent_bytes)
    explanation = Explanation(
        title=f"One message of {readable_bytes(sent)} over {link.name}",
        formula=("seconds = a + m·b",),
        numbers=(
            ("m", "bytes of the message", Quantity(sent, "bytes", f"{sent:,.0f}")),
            ("a", "latency, end to end in software", seconds(link.latency)),
            ("1/b", "bandwidth, one direction, after line coding", rate(link.bandwidth)),
        ),
        result=(
            ("latency part", seconds(link.latency)),
            ("bandwidth part", seconds(sent / link.bandwidth)),
            ("total", seconds(float(cost.latency))),
            ("half of the bandwidth is reached at", size(link.latency * link.bandwidth)),
        ),
        source=("Hockney 1994: latency and bandwidth of one message", *((link.source,) if link.source else ())),
    )
    return explanation, parsed
