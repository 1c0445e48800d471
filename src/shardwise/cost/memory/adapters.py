"""What a layer keeps for its backward pass because of adapters, and which inputs frozen weights need not keep."""

from __future__ import annotations

from shardwise.cost.compute.operators import gradient_share
from shardwise.layout.stages import layers_of_kind
from shardwise.spec.fine_tuning import Part
from shardwise.spec.job import Job
from shardwise.spec.layers import LayerRecord
from shardwise.spec.model import MatrixRole

_JOINED = (MatrixRole.QUERY, MatrixRole.KEY, MatrixRole.VALUE)


def input_share(job: Job, kind: LayerRecord, part: Part, roles: tuple[MatrixRole, ...]) -> float:
    """The share of the layers that keep the input of some matrices, for their gradients or those of their adapters."""
    tuning, layers = job.training.tuning, layers_of_kind(job.model, kind)
    adapters = tuning.adapters
    if part != "router" and tuning.base.quantised and job.stack.quantised_inputs != "freed":
        return gradient_share(job.model, tuning)
    own = part != "experts" or (adapters is not None and adapters.experts)
    read = not _makes_inputs_again(job) and not _reads_dropped_inputs(job)
    adapted = adapters is not None and own and not adapters.roles.isdisjoint(roles) and read
    return max(tuning.trained_share(part, layers), tuning.adapted_share(layers) if adapted else 0.0)


def _reads_dropped_inputs(job: Job) -> bool:
    """Whether the gradients of adapters read what dropout left of their inputs, not the inputs themselves."""
    adapters = job.training.adapters
    return adapters is not None and adapters.dropout > 0 and job.stack.adapters in ("16-bit", "fp32")


def _makes_inputs_again(job: Job) -> bool:
    """Whether a compiled layer makes the inputs of its adapters again, together with what dropout leaves of them.

    Both are elementwise, so that one kernel makes them of what is kept anyway (`models/dropout.py`). Measured:
    bench/results/unseen-tuning-h200.json. Layers that communicate are compiled in parts, between which inputs are kept.
    """
    adapters, degrees = job.training.adapters, job.strategy
    alone = max(degrees.tp, degrees.ep) == 1
    return job.stack.is_own and job.training.compile and alone and adapters is not None and adapters.dropout > 0


def inputs_of_earlier_pass(job: Job) -> float:
    """Inputs of products with a quantised base that stay from the microbatch before until this one has its loss."""
    tuning, model, strategy = job.training.tuning, job.model, job.strategy
    if not tuning.base.quantised or job.stack.quantised_inputs != "kept over losses":
        return 0.0
    widths = 2 * model.hidden + (model.heads * model.value_dim + model.ffn) / strategy.tp
    layers = model.layers / strategy.pp * gradient_share(model, tuning)
    return layers * widths * job.microbatch_tokens * job.training.recipe.activation


def adapter_bytes(job: Job, element: float, kind: LayerRecord) -> float:
    """What the adapters of a layer keep, ``element`` bytes of each number; the mean of its kind of layers.

    The results of the narrow first products; with dropout their inputs once for each matrix, and masks, unless these
    are drawn again; with DoRA the outputs that its lengths scale.
    """
    model, tuning, strategy = job.model, job.training.tuning, job.strategy
    adapters, tokens, kept = tuning.adapters, job.microbatch_tokens, 0.0
    assert adapters is not None
    experts = model.experts_of(kind)
    width = experts.shared_ffn if experts else model.ffn
    groups = [(tokens, strategy.tp, (*model.mixer_matrices(kind), *(model.mlp_matrices(width) if width else ())))]
    if experts and adapters.experts:
        ranks = strategy.expert_tensor_parallel
        groups.append((tokens / strategy.tp * experts.top_k * ranks, ranks, model.mlp_matrices(experts.ffn)))
    for rows, ranks, matrices in groups:
        drops = list(filter(adapters.adapts, matrices))
        if job.stack.joined_projections:
            joined = [matrix for matrix in drops if matrix.role in _JOINED]
            drops = [matrix for matrix in drops if matrix not in joined[1:]]
            if len(joined) < len(_JOINED):
                kept += rows * element * sum(matrix.outputs * matrix.share(ranks) for matrix in joined)
        for matrix in filter(adapters.adapts, matrices):
            kept += rows * adapters.rank * element
            if adapters.dropout and job.stack.adapters != "added" and matrix in drops:
                inputs = matrix.inputs * (matrix.share(ranks) if matrix.split == "row" else 1)
                kept += rows * inputs * (element + 1)
            # Of a compiled layer's gate and up, their lengths are multiplied once more: only the products are kept.
            again = job.training.compile and matrix.role in (MatrixRole.GATE, MatrixRole.UP)
            if adapters.method == "dora" and not again:
                outputs = matrix.outputs * (matrix.share(ranks) if matrix.split == "column" else 1)
                kept += rows * outputs * element
    return kept * tuning.adapted_share(layers_of_kind(model, kind))
