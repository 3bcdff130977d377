"""Memory and traffic of `dp`, in which one process drives several devices."""

from paceline.config.schema import Config
from paceline.distributed.mesh import ParallelDims
from paceline.parallel.cost import Cost, ModelShape, Workload, total_bytes


def estimate(shape: ModelShape, axes: ParallelDims, work: Workload, config: Config) -> Cost:
    """Estimate the cost of `dp` on device 0, which holds what a `ddp` rank holds.

    The other devices hold no optimizer state. All traffic of a step passes through device 0: it
    sends its weights and buffers to N-1 devices and receives as many gradients, 2(N-1)Ψ, where a
    rank of an all-reduce sends 2(N-1)/N Ψ (Patarasuk & Yuan, 2009, section 3). The scheme is
    described in the documentation of torch.nn.DataParallel.
    """
    gradients = total_bytes(shape.trained)
    return Cost(
        parameters=shape.parameter_bytes + shape.buffer_bytes,
        # each gradient starts at a multiple of 64 bytes in its bucket
        gradients=sum(-(-tensor.size_bytes // 64) * 64 for tensor in shape.trained),
        optimizer=shape.moment_bytes,
        activations=work.activation_bytes(shape),
        traffic={"copy": (axes.data - 1) * (2 * gradients + shape.buffer_bytes)},
    )
