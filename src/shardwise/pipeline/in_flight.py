"""How many chunks' activations a rank holds at its peak, by formula: what a memory model needs."""

from __future__ import annotations

from shardwise.pipeline.build import chunks_per_rank
from shardwise.spec.errors import SpecError

SOURCES = {
    "sequential": "one microbatch at a time",
    "gpipe": "Huang et al. 2019 (arXiv 1811.06965): all m",
    "1f1b": "Narayanan et al. 2021 (arXiv 2104.04473) section 2.2: p - r",
    "interleaved": "Megatron-LM schedules: 2(p-r-1) + (v-1)p + 1",
    "zb-h1": "Qi et al. 2023 (arXiv 2401.10241): p on every rank, r of them waiting for their weight gradient",
    "zb-h2": "Qi et al. 2023: 2p - 1 on every rank",
    "zb-1p": "Qi et al. 2023: the limit p",
    "zb-2p": "Qi et al. 2023: the limit 2p",
    "zbv": "Qi et al. 2023: 2p",
    "v-half": "Qi et al. 2024 (arXiv 2405.15362): (p+2)//2 microbatches of two chunks",
    "v-min": "Qi et al. 2024: (p+4)//3 microbatches of two chunks, some ranks 1 or 2 chunks less where p = 2 mod 3",
    "dualpipe": "DeepSeek DualPipe README: p + 1",
    "dualpipev": "DualPipe on 2p ranks, folded: 2p + 1",
}


def peak_chunks_in_flight(name: str, ranks: int, microbatches: int, chunks: int | None, rank: int) -> int:
    """Activations of one chunk (stage) and microbatch that ``rank`` holds at its peak.

    Equal to ``max`` over the built schedule; with times given, zbv, v-half, v-min, zb-1p and zb-2p may hold less,
    never more. Divide by the chunks per rank for microbatches of the whole rank.
    """
    if not 0 <= rank < ranks:
        raise SpecError("rank", f"{rank} is none of the {ranks} pipeline ranks", f"give 0 to {ranks - 1}")
    p, m, r, v = ranks, microbatches, rank, chunks_per_rank(name, chunks)
    match name:
        case "sequential":
            return 1
        case "gpipe":
            return m
        case "1f1b":
            return min(m, p - r)
        case "interleaved":
            return min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1)
        case "zb-h1" | "zb-1p":
            return min(m, p)
        case "zb-h2":
            return min(m, 2 * p - 1)
        case "zb-2p":
            return min(m, 2 * p)
        case "zbv":
            return min(2 * m, 2 * p)
        case "v-half" | "v-min":
            return min(2 * m, m + _ahead(name, p, m, r), _v_peak(name, p, r))
        case "dualpipe":
            return _dualpipe_peak(p, m, r)
        case "dualpipev":
            return min(2 * m, m + r + 1, 2 * p + 1)
    raise SpecError("schedule", f"{name} has no fixed peak", "build it and ask peak_activations")


def _v_peak(name: str, p: int, r: int) -> int:
    if name == "v-half":
        return 2 * ((p + 2) // 2)
    # Where p = 2 mod 3 the limit is not tight on every third rank.
    slack = 0 if p % 3 != 2 or r % 3 else 2 - (r == 0)
    return 2 * ((p + 4) // 3) - slack


def _ahead(name: str, p: int, m: int, r: int) -> int:
    """Chunks of the way back that a rank holds beside all m of the way down, where the limit is not reached.

    Read off the built schedules, and equal to them for every p up to 44 (`tests/pipeline/test_closed_forms.py`).
    """
    if name == "v-half":
        return (r + 1) // 2 + 1 if p % 2 else r // 2 + 2 - (r == 0)
    if p % 3 == 0:
        return (r + 2) // 3 + 1 - (r == 1)
    return (r + 1) // 3 + 1 + (p % 3 == 2 and r % 3 == 1 and r + 3 * m >= 2 * p + 3)


def _dualpipe_peak(p: int, m: int, r: int) -> int:
    if p == 1:
        return 1
    # Microbatches that enter at this rank's end, and how far from that end it is.
    entering = (m + 1) // 2 if r < p // 2 else m // 2
    return min(m, entering + min(r, p - 1 - r) + 1, p + 1)
