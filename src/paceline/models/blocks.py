"""Find the repeated blocks of a model, which are the units of sharding, activation checkpointing
and pipeline stages, and the layers before and after them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

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

    Of nested lists, the outermost is used. Of a model with a vision tower, only the blocks of its
    language model count: a rank without images does not run the tower. Children without
    parameters (activations between layers) are blocks too, because pipeline stages must run them.
    """
    best: list[tuple[str, nn.Module]] = []
    max_size = 0
    inside = _names_in_decoder(model)
    for name, module in model.named_modules():
        if inside is not None and name not in inside:
            continue
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > max_size:
            max_size = size
            best = [
                (f"{name}.{key}" if name else key, child) for key, child in module.named_children()
            ]
    return best


def _names_in_decoder(model: nn.Module) -> set[str] | None:
    """Return the names of the modules in the language model of a vision-language model; None for
    another model."""
    base = base_model(model)
    get_decoder = getattr(base, "get_decoder", None)
    if get_decoder is None or not hasattr(getattr(base, "config", None), "vision_config"):
        return None
    members = {id(module) for module in get_decoder().modules()}
    names = {name for name, module in model.named_modules() if id(module) in members}
    return names or None


class ModelEnds(NamedTuple):
    """Dotted names of the layers before and after the blocks of a language model.

    Args:
        embedding: the token embedding, or "".
        head: the last norm, if it follows the blocks, and the output head.
    """

    embedding: str = ""
    head: tuple[str, ...] = ()


def find_ends(model: nn.Module) -> ModelEnds:
    """Return the ends of a language model of transformers.

    There are none in other models, and in a model whose embedding or head shares a weight with
    another module: then the weight may be used while its module does not run.
    """
    base = base_model(model)
    can_generate = getattr(base, "can_generate", None)
    blocks = [name for name, _ in find_blocks(model)]
    if not callable(can_generate) or not can_generate() or not blocks:
        return ModelEnds()
    names = {module: name for name, module in model.named_modules()}
    embedding = names.get(base.get_input_embeddings())
    head = names.get(base.get_output_embeddings())
    if embedding is None or head is None:
        return ModelEnds()
    tied = tied_names(model)
    for end in (embedding, head):
        is_tied = any(_contains(end, name) for name in (*tied, *tied.values()))
        if is_tied or any(_contains(end, block) or _contains(block, end) for block in blocks):
            return ModelEnds()
    norm = _last_norm(model, blocks[0].rpartition(".")[0], embedding)
    return ModelEnds(embedding, (head,) if norm is None else (norm, head))


def _contains(module: str, name: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def _last_norm(model: nn.Module, blocks: str, embedding: str) -> str | None:
    """Return the norm that follows the list of the blocks in the module that contains this list and
    the embedding."""
    parent = blocks.rpartition(".")[0]
    if embedding.rpartition(".")[0] != parent:
        return None
    children = dict(model.get_submodule(parent).named_children())
    prefix, names = f"{parent}." if parent else "", list(children)
    for name in names[names.index(blocks.removeprefix(prefix)) + 1 :]:
        if type(children[name]).__name__.endswith("Norm"):
            return f"{prefix}{name}"
    return None
