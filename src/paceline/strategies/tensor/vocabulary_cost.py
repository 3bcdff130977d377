"""Traffic of an embedding and a head that are split by the rows of the vocabulary. Imports no
torch."""

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import all_reduce_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.models.tensor_plan.style import EMBEDDING, HEAD
from paceline.parallel.cost import Workload

_FLOAT32_BYTES = 4


def vocabulary_traffic(
    model: ModelShape,
    axes: ParallelDims,
    work: Workload,
    config: Config,
    has_embedding: bool,
    has_head: bool,
) -> int:
    """Return the bytes that a rank sends per step in all-reduces of the embedding and of the loss.

    The embedding all-reduces its output. The loss all-reduces three numbers of each token with a
    label (four with label smoothing), and the gradient of the head's input.

    Args:
        has_embedding, has_head: whether the rank runs the first and the last pipeline stage.
    """
    tensors = {tensor.name: tensor for tensor in model.parameters}
    sent_bytes = 0.0
    labels = work.positions if work.labels is None else work.labels
    for name, style in model.tensor_plan.items():
        weight = _weight(model, tensors, name)
        if weight is None:
            continue
        uses = model.layer_uses.get(name, ()) if model.layer_uses is not None else None
        if style == EMBEDDING and has_embedding:
            element_bytes = weight.element_bytes
            if axes.shard > 1 and model.low_bytes:
                element_bytes = min(element_bytes, model.low_bytes)
            times = 1 if uses is None else len(uses)
            sent_bytes += times * work.positions * weight.shape[1] * element_bytes
        elif style == HEAD and has_head:
            numbers = 4 if config.train_args.label_smoothing_factor else 3
            sent_bytes += labels * numbers * _FLOAT32_BYTES
            if uses is None or any(use.needs_gradient for use in uses):
                element_bytes = model.low_bytes or weight.element_bytes
                sent_bytes += labels * weight.shape[1] * element_bytes
    return all_reduce_bytes(work.micro_batches * sent_bytes, axes.tensor)


def _weight(model: ModelShape, tensors: dict[str, TensorShape], module: str) -> TensorShape | None:
    name = f"{module}.weight"
    return tensors.get(model.aliases.get(name, name))
