"""What the ZeRO strategies have in common."""

from paceline.config.schema import Config
from paceline.parallel.cost import ModelShape, TensorShape

#: Optimizers that keep a step count beside each tensor.
_COUNTING = ("adamw", "adam", "rmsprop", "adagrad")


def step_count_bytes(config: Config) -> int:
    """Bytes of the step count that the optimizer keeps beside each tensor."""
    return 4 if config.train_args.optim in _COUNTING else 0


def batch_norm_names(shape: ModelShape) -> frozenset[str]:
    """Parameters of batch and instance normalizations, by name: what lies beside a running mean."""
    modules = {
        one.name.rpartition(".")[0]
        for one in shape.buffers
        if one.name.rpartition(".")[2] == "running_mean"
    }
    return frozenset(one.name for one in shape.parameters if one.name.rpartition(".")[0] in modules)


def low_bytes_of(tensor: TensorShape, low_bytes: int, normed: frozenset[str]) -> int:
    """Bytes an element of a trained weight, and of its gradient."""
    return (
        low_bytes
        if low_bytes and tensor.element_bytes == 4 and tensor.name not in normed
        else tensor.element_bytes
    )


def statistics_traffic(shape: ModelShape, num_ranks: int) -> dict[str, int]:
    """Running statistics are broadcast once a step."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    size = sum(one.size_bytes for one in shape.buffers if one.name.rpartition(".")[2] in names)
    return {"broadcast": size} if size and num_ranks > 1 else {}
