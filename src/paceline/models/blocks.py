"""Find the repeated blocks of a model, which are the units of sharding, activation checkpointing
and pipeline stages."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

#: Batch and instance normalization: the layers that can have running statistics.
BATCH_NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)
DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)


def base_model(model: Any) -> Any:
    """Return the model inside peft's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def tied_names(model: nn.Module) -> dict[str, str]:
    """Return {other name: first name} for parameters that have several names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if first[id(parameter)] != name
    }


def hidden_matrices(model: nn.Module) -> frozenset[str]:
    """Return the names of the matrices between the embeddings and the output layer, which Muon
    updates.

    The output layer is the model's output embedding or, in a model that names none, the module of
    the last matrix.
    """
    get_output = getattr(base_model(model), "get_output_embeddings", None)
    output = get_output() if callable(get_output) else None
    excluded = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) or module is output
        for parameter in module.parameters(recurse=False)
    }
    matrices = [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and id(parameter) not in excluded
    ]
    return frozenset(matrices if output is not None else matrices[:-1])


def wrap_forward(module: nn.Module, wrapper: Callable[..., Any]) -> Callable[[], None]:
    """Replace ``module.forward`` by ``wrapper(original, …)``, where ``original`` is the replaced
    method.

    Returns:
        A function that restores the original method.
    """
    original = module.forward
    module.forward = partial(wrapper, original)
    return partial(setattr, module, "forward", original)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block: dropout is off, and running statistics do
    not change."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (dotted name, module) of each block, in the model's order: the children of the
    ModuleList or Sequential with the most parameters.

    Of nested lists, the outermost is used. Children without parameters (activations between layers)
    are blocks too, because pipeline stages must run them.
    """
    best: list[tuple[str, nn.Module]] = []
    max_size = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > max_size:
            max_size = size
            best = [
                (f"{name}.{key}" if name else key, child) for key, child in module.named_children()
            ]
    return best
