"""Memory and traffic of experts that ranks divide, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module

from paceline.config.schema import Config
from paceline.distributed.collective_bytes import scatter_bytes
from paceline.distributed.mesh import ParallelDims
from paceline.models.json_config import first_number, language_fields
from paceline.models.shape.record import ModelShape, TensorShape
from paceline.parallel.cost import Workload

#: Fields of config.json with the number of experts of a token.
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
_COUNT_BYTES = 8


def split_experts(shape: ModelShape, size: int) -> tuple[ModelShape, ModelShape]:
    """Return the shape of a model without experts, and the shape of the experts that each of
    ``size`` ranks holds."""
    rest = tuple(each for each in shape.parameters if not _is_of_experts(each.name))
    experts = tuple(_local(each, size) for each in shape.parameters if _is_of_experts(each.name))
    return (
        replace(shape, parameters=rest),
        replace(shape, parameters=experts, buffers=(), embedding="", head=(), aliases={}),
    )


def exchange_bytes(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> int:
    """Return the bytes that a rank sends to exchange tokens in a step.

    In each layer, the hidden states of the tokens go to the ranks of their experts, and the results
    go back: twice in forward and, as gradients, twice in backward. Recomputation and the pass that
    counts the tokens for the auxiliary loss repeat the forward.
    """
    # Not imported above: these modules name torch in their types, and costs are known without it.
    builtin = import_module("paceline.models.builtin")
    coefficient = import_module("paceline.models.head.router_coefficient")
    fields = language_fields(builtin.config_numbers(config.model))
    chosen = first_number(fields, *_CHOSEN) or 1
    recomputed = config.train_args.recomputed_share(len(shape.blocks))
    forwards = 1 + recomputed + (coefficient.coefficient_of(config) > 0)
    size, rows = axes.expert, work.positions * chosen
    sent, received = work.exchanged_rows or (rows * (size - 1) / size,) * 2
    total = 0.0
    for tensors, is_reached in _layers(shape):
        weights = [each for each in tensors if ".lora_" not in each.name]
        element_bytes = weights[0].element_bytes
        if axes.shard > 1 and shape.low_bytes:
            element_bytes = min(element_bytes, shape.low_bytes)
        is_trained = is_reached or any(each.trainable for each in tensors)
        row_bytes = expert_width(weights) * element_bytes
        # The gradients of what was received go back to where it came from.
        total += row_bytes * (forwards + is_trained) * sent
        total += row_bytes * (forwards + is_reached) * received
        total += forwards * scatter_bytes(weights[0].shape[0] * _COUNT_BYTES, size)
    return round(work.micro_batches * total)


def expert_width(weights: list[TensorShape]) -> int:
    """Return the width of the activations between layers: a size that all weights of the experts,
    [experts, outputs, inputs], have in common."""
    common = set(weights[0].shape[1:])
    for tensor in weights:
        if len(tensor.shape) == 3:
            common &= set(tensor.shape[1:])
    return min(common or {weights[0].shape[-1]})


def _layers(shape: ModelShape) -> Iterable[tuple[list[TensorShape], bool]]:
    """Return the tensors of each layer's experts, and whether a parameter before them is
    trained."""
    layers: dict[str, list[TensorShape]] = {}
    reached: dict[str, bool] = {}
    has_trained = False
    for tensor in shape.parameters:
        if _is_of_experts(tensor.name):
            layer = tensor.name.partition(".experts.")[0]
            layers.setdefault(layer, []).append(tensor)
            reached.setdefault(layer, has_trained)
        has_trained = has_trained or tensor.trainable
    return [(tensors, reached[layer]) for layer, tensors in layers.items()]


def _local(tensor: TensorShape, size: int) -> TensorShape:
    dim = 1 if ".lora_B." in tensor.name else 0
    local = tuple(
        length // size if axis == dim else length for axis, length in enumerate(tensor.shape)
    )
    return replace(tensor, shape=local)


def _is_of_experts(name: str) -> bool:
    return ".experts." in name
