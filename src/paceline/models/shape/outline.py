"""Read the shape of a model from its modules, on any device including the meta device."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from paceline.config.derive import average_bytes_per_element, optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.config.schema.train_args import TrainArgs
from paceline.core.errors import ConfigError
from paceline.models.adapters.quantize import numbers_per_element, scale_tensors
from paceline.models.blocks import (
    base_model,
    evaluation_mode,
    find_blocks,
    find_ends,
    hidden_matrices,
    tied_names,
)
from paceline.models.shape.equal_blocks import for_all_blocks, without_equal_blocks
from paceline.models.shape.layer_uses import trace_layer_uses
from paceline.models.shape.record import (
    LayerUse,
    ModelShape,
    OptimizerMemory,
    TensorShape,
    modules_around,
)
from paceline.models.shape.trace import Trace, on_meta, trace_model
from paceline.models.tensor_plan.plan import find_tensor_plan
from paceline.models.tensor_plan.sequence import splits_tokens
from paceline.models.weights.load import final_dtype


@dataclass(frozen=True)
class Probe:
    """Runs a forward pass on a batch of ``rows`` samples, to measure the outputs of the blocks if
    the config of the model does not determine them."""

    run: Callable[[nn.Module], object]
    rows: int


def outline(model: nn.Module, config: Config, probe: Probe | None = None) -> ModelShape:
    """Return the shape of the model that the task built, before the strategy sets it up."""
    plan = _tensor_plan(model, config)
    return _outline(model, config, probe, plan, *_traced(model, plan, probe))


def outline_of_all_blocks(
    model: nn.Module, config: Config, stand_ins: Mapping[str, str]
) -> ModelShape | None:
    """Return the shape of a model from a part of its blocks; None if the part cannot be traced or
    shares weights between blocks.

    Args:
        model: on the meta device.
        stand_ins: the result of :func:`~paceline.models.shape.equal_blocks.without_equal_blocks`.
    """
    plan = _tensor_plan(model, config)
    traced = _traced_part(model, plan)
    if traced is None or any(
        module in stand_ins for name in tied_names(model) for module in modules_around(name)
    ):
        return None
    part = _outline(model, config, None, plan, *traced)
    matrices = dict.fromkeys(part.optimizer.matrices)
    return replace(
        part,
        parameters=_tensors_of_all_blocks(part.parameters, stand_ins),
        buffers=_tensors_of_all_blocks(part.buffers, stand_ins),
        optimizer=replace(part.optimizer, matrices=frozenset(for_all_blocks(matrices, stand_ins))),
        blocks=tuple(stand_ins),
        tensor_plan=for_all_blocks(plan, stand_ins),
        block_output_elements=part.block_output_elements[:1] * len(stand_ins),
        layer_uses=part.layer_uses and for_all_blocks(part.layer_uses, stand_ins),
    )


def _tensors_of_all_blocks(
    tensors: Iterable[TensorShape], stand_ins: Mapping[str, str]
) -> tuple[TensorShape, ...]:
    by_name = for_all_blocks({tensor.name: tensor for tensor in tensors}, stand_ins)
    return tuple(
        tensor if name == tensor.name else replace(tensor, name=name)
        for name, tensor in by_name.items()
    )


def _outline(
    model: nn.Module,
    config: Config,
    probe: Probe | None,
    plan: dict[str, str],
    phases: dict[str, tuple[str, ...]] | None,
    layer_uses: dict[str, tuple[LayerUse, ...]] | None,
) -> ModelShape:
    args = config.train_args
    ends = find_ends(model)
    return ModelShape(
        parameters=tuple(
            TensorShape(
                name,
                tuple(parameter.shape),
                final_dtype(parameter).itemsize,
                parameter.requires_grad,
                numbers_per_element(parameter),
            )
            for name, parameter in model.named_parameters()
        ),
        buffers=tuple(
            TensorShape(name, tuple(buffer.shape), buffer.element_size())
            for name, buffer in (*model.named_buffers(), *scale_tensors(model))
        ),
        optimizer=_optimizer_memory(model, args),
        low_bytes=2 if args.mixed_dtype else 0,
        blocks=tuple(name for name, _ in find_blocks(model)),
        embedding=ends.embedding,
        head=ends.head,
        tensor_plan=plan,
        aliases=tied_names(model),
        block_output_elements=_block_outputs(model, probe),
        phases=phases,
        layer_uses=layer_uses,
        splits_tokens=splits_tokens(model, plan),
    )


def _optimizer_memory(model: nn.Module, args: TrainArgs) -> OptimizerMemory:
    """Return the size of the optimizer's state. bitsandbytes has the tables of its 8-bit values
    once, torchao twice per tensor."""
    has_step = args.optim in ("adamw", "adam", "rmsprop", "adagrad", "adamw_torchao_8bit", "muon")
    is_torchao = args.optim == "adamw_torchao_8bit"
    return OptimizerMemory(
        element_bytes=optimizer_bytes_per_element(args),
        scalar_bytes=4 if has_step else 0,
        quantizes=args.optim in ("adamw_8bit", "paged_adamw_8bit", "adamw_torchao_8bit"),
        quantizes_whole_blocks=is_torchao,
        table_bytes=2 * 256 * 4 if is_torchao else 0,
        average_bytes=average_bytes_per_element(args),
        matrices=hidden_matrices(model) if args.optim == "muon" else frozenset(),
    )


def _traced(
    model: nn.Module, plan: dict[str, str], probe: Probe | None
) -> tuple[dict[str, tuple[str, ...]] | None, dict[str, tuple[LayerUse, ...]] | None]:
    """Return the phases and the layer uses of a :class:`ModelShape`. On the meta device, equal
    blocks are traced once, if the model runs without the others."""
    is_on_meta = on_meta(model)
    if probe is None and is_on_meta:
        with without_equal_blocks(model) as stand_ins:
            traced = _traced_part(model, plan) if stand_ins else None
            if traced is not None:
                phases, uses = traced
                return phases, uses and for_all_blocks(uses, stand_ins)
    return _phases(model, probe), trace_layer_uses(model, plan) if plan and is_on_meta else None


def _traced_part(
    model: nn.Module, plan: dict[str, str]
) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[LayerUse, ...]] | None] | None:
    """Return the phases and the layer uses of a part of the blocks; None if it does not run."""
    result = trace_model(model)
    if result is None or result.error is not None:
        return None
    uses = trace_layer_uses(model, plan) if plan else None
    return (_sorted_phases(result), uses) if uses is not None or not plan else None


def _phases(model: nn.Module, probe: Probe | None) -> dict[str, tuple[str, ...]] | None:
    """Return when parameters outside the blocks are used, or None if the model cannot be traced.

    The model is traced if there is a probe, or if it is on the meta device, where tracing is cheap.
    Some models cannot run their blocks there; parameters that are not used before the first block
    then count as used after the last one.
    """
    if probe is None and not on_meta(model):
        return None
    result = trace_model(model, None if probe is None else probe.run)
    if result is None or (result.error is not None and not (on_meta(model) and result.order)):
        return None
    return _sorted_phases(result)


def _sorted_phases(result: Trace) -> dict[str, tuple[str, ...]]:
    return {name: tuple(sorted(phases)) for name, phases in result.phases.items()}


def _tensor_plan(model: nn.Module, config: Config) -> dict[str, str]:
    try:
        return find_tensor_plan(model, config.parallel.tensor_plan)
    except ConfigError:
        return {}  # reported if tensor parallelism is requested


def _block_outputs(model: nn.Module, probe: Probe | None) -> tuple[float, ...]:
    """Return the number of elements of each block's output per token or sample, or an empty tuple
    if unknown."""
    blocks = find_blocks(model)
    inner = base_model(model)
    config: Any = getattr(inner, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else None
    if isinstance(getattr(text, "hidden_size", None), int):
        return (float(text.hidden_size),) * len(blocks)
    return () if probe is None else _probed(model, [block for _, block in blocks], probe)


def _probed(model: nn.Module, blocks: list[nn.Module], probe: Probe) -> tuple[float, ...]:
    sizes: dict[int, float] = {}

    def note(block: nn.Module, _: object, output: object) -> None:
        if isinstance(output, torch.Tensor):
            sizes[id(block)] = output.numel() / probe.rows

    with ExitStack() as stack, evaluation_mode(model), torch.no_grad():
        for block in blocks:
            stack.enter_context(block.register_forward_hook(note))
        probe.run(model)
    if any(id(block) not in sizes for block in blocks):
        return ()
    return tuple(sizes[id(block)] for block in blocks)
