"""The repeated blocks of a model: the units of sharding, of activation checkpointing and of
pipeline stages."""

from typing import Any

from torch import nn

#: Batch and instance normalizations: layers with running statistics, or that could have them.
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


def find_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(dotted name, module) of each block, in the order of the model: the children of the
    ModuleList or Sequential that holds the most parameters; empty where there is none.

    Of nested lists the outermost counts. Children without parameters (activations between layers)
    are blocks too: who cuts a model into stages must run them.
    """
    best: list[tuple[str, nn.Module]] = []
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or len(module) < 2:
            continue
        size = sum(one.numel() for one in module.parameters())
        if size > most:
            most = size
            best = [
                (f"{name}.{key}" if name else key, child) for key, child in module.named_children()
            ]
    return best
