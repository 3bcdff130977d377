"""The operations of a process group on CUDA tensors: what NCCL accepts, and the same operation in
host memory over Gloo."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

#: ncclDataType of torch's ProcessGroupNCCL.
FLOAT8 = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz}
DTYPES = FLOAT8 | {
    torch.int8, torch.uint8, torch.float32, torch.float64, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.bool,
}  # fmt: skip
_REDUCTIONS = {int(op): op for op in dist.ReduceOp.RedOpType.__members__.values()}
_SUM, _AVG, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX
_NCCL_REDUCTIONS = (_SUM, _AVG, _MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT)

#: The communicator: a Gloo group with the global ranks of its members in `ranks`.
Gloo = Any
Tensors = list[torch.Tensor]
#: Arguments of an operator of c10d, by name.
Arguments = dict[str, Any]


@dataclass
class Operation:
    """One operation of a call.

    Args:
        run: called with copies of the inputs in host memory, and with host memory for the outputs;
            returns what remains to be waited for.
        peer: the other rank of a message.
    """

    name: str
    inputs: Tensors
    outputs: Tensors
    run: Callable[[Tensors, Tensors], list[dist.Work] | None]
    peer: int | None = None
    sources: Tensors = field(default_factory=list)
    targets: Tensors = field(default_factory=list)

    @property
    def tensors(self) -> Tensors:
        return [*self.inputs, *self.outputs]

    @property
    def summary(self) -> tuple[str, int | None, str | None, int | None]:
        """The operation in the log, the same on all ranks of a collective."""
        if not self.tensors or self.name in ("all_to_all", "gather", "scatter"):
            return self.name, None, None, self.peer
        tensor = self.tensors[0]
        return self.name, tensor.numel(), str(tensor.dtype).removeprefix("torch."), self.peer


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


# -- in host memory, over Gloo
def synchronize(group: Gloo) -> None:
    """Wait until all ranks have called this."""
    _reduce_on_host(group, torch.zeros(1), _SUM)


def _reduce_on_host(group: Gloo, values: torch.Tensor, op: Any) -> None:
    """Reduce over the ranks, in place."""
    if values.dtype == torch.bool:  # as NCCL, which has no bool
        values, op = values.view(torch.uint8), _MAX if op == _SUM else op
    options = dist.AllreduceOptions()
    options.reduceOp = _SUM if op == _AVG else op
    group.allreduce([values], options).wait()
    if op == _AVG:
        values.div_(group.size())


def _gather_on_host(group: Gloo, source: torch.Tensor) -> Tensors:
    gathered = source.new_empty(group.size() * source.numel())
    group._allgather_base(_bytes(gathered), _bytes(source)).wait()
    return list(gathered.chunk(group.size()))


def _exchange_on_host(
    group: Gloo, target: torch.Tensor, source: torch.Tensor, received: list[int], sent: list[int]
) -> None:
    """Send a part of ``source`` to each rank; ``received`` and ``sent`` are numbers of bytes."""
    group.alltoall_base(_bytes(target), _bytes(source), received, sent).wait()


# -- arguments of an operator of c10d → operations
def _reduction(call: Arguments) -> Any:
    """Return the operation of a reduction.

    Raises:
        ValueError, TypeError: NCCL does not have it.
    """
    op = _REDUCTIONS[call["reduce_op"].op()]
    tensors = call.get("tensors") or call.get("input_tensors") or call.get("inputs")
    tensor = call["input_tensor"] if tensors is None else tree_leaves(tensors)[0]
    if op not in _NCCL_REDUCTIONS:
        raise ValueError(f"Cannot use ReduceOp.{op.name} with NCCL")
    if op == _AVG and tensor.dtype == torch.bool:
        raise TypeError("Cannot use ReduceOp.AVG with boolean inputs")
    if tensor.dtype in FLOAT8:
        raise TypeError("Unsupported Float8 type for NCCL reduction")
    return op


def _all_reduce(group: Gloo, call: Arguments) -> list[Operation]:
    op = _reduction(call)

    def run(sources: Tensors, targets: Tensors) -> None:
        _reduce_on_host(group, targets[0].copy_(sources[0]), op)

    return [Operation("all_reduce", [tensor], [tensor], run) for tensor in call["tensors"]]


def _reduce(group: Gloo, call: Arguments) -> list[Operation]:
    op, tensors = _reduction(call), call["tensors"]

    def run(sources: Tensors, targets: Tensors) -> None:
        _reduce_on_host(group, sources[0], op)
        for target in targets:
            target.copy_(sources[0])

    is_root = group.rank() == call["root_rank"]
    return [Operation("reduce", tensors, tensors if is_root else [], run)]


def _broadcast(group: Gloo, call: Arguments) -> list[Operation]:
    options = dist.BroadcastOptions()
    options.rootRank = call["root_rank"]
    is_root = group.rank() == options.rootRank

    def run(sources: Tensors, targets: Tensors) -> None:
        group.broadcast([_bytes(each) for each in (*sources, *targets)], options).wait()

    tensors = call["tensors"]
    return [Operation("broadcast", tensors if is_root else [], [] if is_root else tensors, run)]


def _all_gather(group: Gloo, call: Arguments) -> list[Operation]:
    def run(sources: Tensors, targets: Tensors) -> None:
        parts = _gather_on_host(group, sources[0])
        flat = torch.cat(parts) if len(targets) == 1 else None
        for target, values in zip(targets, parts if flat is None else [flat], strict=True):
            target.copy_(values)

    pairs = _pairs(call)
    for (source,), outputs in pairs:
        _check_sizes("output", outputs, source, group.size() * source.numel())
    return [Operation("all_gather", sources, outputs, run) for sources, outputs in pairs]


def _reduce_scatter(group: Gloo, call: Arguments) -> list[Operation]:
    op = _reduction(call)

    def run(sources: Tensors, targets: Tensors) -> None:
        values = torch.cat(sources)
        _reduce_on_host(group, values, op)
        targets[0].copy_(values.chunk(group.size())[group.rank()])

    pairs = _pairs(call)
    for inputs, (output,) in pairs:
        _check_sizes("input", inputs, output, group.size() * output.numel())
    return [Operation("reduce_scatter", inputs, outputs, run) for inputs, outputs in pairs]


def _pairs(call: Arguments) -> list[tuple[Tensors, Tensors]]:
    """Return the inputs and outputs of each all-gather or reduce-scatter of a call."""
    if "outputs" in call:
        pairs = zip(call["inputs"], call["outputs"], strict=True)
        return [([source], [output]) for source, output in pairs]
    if "output_tensor" in call:
        return [([call["input_tensor"]], [call["output_tensor"]])]
    return [(tree_leaves(call["input_tensors"]), tree_leaves(call["output_tensors"]))]


def _check_sizes(side: str, tensors: Tensors, part: torch.Tensor, num_elements: int) -> None:
    if any(tensor.dtype != part.dtype for tensor in tensors):
        raise TypeError("output tensor must have the same type as input tensor")
    if sum(tensor.numel() for tensor in tensors) != num_elements:
        raise ValueError(f"{side} tensor size must be equal to world_size times the other size")


def _all_to_all(group: Gloo, call: Arguments) -> list[Operation]:
    if "output" in call:
        inputs, outputs = [call["input"]], [call["output"]]
        received = _split_bytes(call["output"], call["output_split_sizes"], group.size())
        sent = _split_bytes(call["input"], call["input_split_sizes"], group.size())
    else:
        inputs, outputs = call["input_tensors"], call["output_tensors"]
        received, sent = [each.nbytes for each in outputs], [each.nbytes for each in inputs]

    def run(sources: Tensors, targets: Tensors) -> None:
        arrived = torch.cat(targets)
        _exchange_on_host(group, arrived, torch.cat(sources), received, sent)
        for target, part in zip(
            targets, arrived.split([len(each) for each in targets]), strict=True
        ):
            target.copy_(part)

    return [Operation("all_to_all", inputs, outputs, run)]


def _split_bytes(tensor: torch.Tensor, rows: list[int], size: int) -> list[int]:
    if not rows:
        return [tensor.nbytes // size] * size
    return [tensor.nbytes // len(tensor) * number for number in rows]


def _gather(group: Gloo, call: Arguments) -> list[Operation]:
    def run(sources: Tensors, targets: Tensors) -> None:
        for target, values in zip(targets, _gather_on_host(group, sources[0]), strict=False):
            target.copy_(values)

    outputs = call["output_tensors"][0] if group.rank() == call["root_rank"] else []
    return [Operation("gather", call["input_tensors"], outputs, run)]


def _scatter(group: Gloo, call: Arguments) -> list[Operation]:
    root, num_bytes = call["root_rank"], call["output_tensors"][0].nbytes
    is_root = group.rank() == root

    def run(sources: Tensors, targets: Tensors) -> None:
        received = [num_bytes if rank == root else 0 for rank in range(group.size())]
        source = torch.cat(sources) if is_root else targets[0].new_empty(0)
        _exchange_on_host(group, targets[0], source, received, [num_bytes * is_root] * group.size())

    inputs = call["input_tensors"][0] if is_root else []
    return [Operation("scatter", inputs, call["output_tensors"], run)]


def _send(group: Gloo, call: Arguments) -> list[Operation]:
    def run(sources: Tensors, targets: Tensors) -> list[dist.Work]:
        return [group.send([_bytes(sources[0])], call["dst"], 0)]

    return [Operation("send", call["tensors"], [], run, group.ranks[call["dst"]])]


def _receive(group: Gloo, call: Arguments) -> list[Operation]:
    def run(sources: Tensors, targets: Tensors) -> list[dist.Work]:
        return [group.recv([_bytes(targets[0])], call["src"], 0)]

    return [Operation("recv", [], call["tensors"], run, group.ranks[call["src"]])]


def _receive_any(group: Gloo, call: Arguments) -> list[Operation]:
    raise RuntimeError("Backend nccl does not support recvAnysource")


def _barrier(group: Gloo, call: Arguments) -> list[Operation]:
    return [Operation("barrier", [], [], lambda *_: synchronize(group))]


OPERATIONS: dict[str, Callable[[Gloo, Arguments], list[Operation]]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _broadcast,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather,
    "allgather_into_tensor_coalesced_": _all_gather,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter,
    "alltoall_": _all_to_all,
    "alltoall_base_": _all_to_all,
    "gather_": _gather,
    "scatter_": _scatter,
    "send": _send,
    "recv_": _receive,
    "recv_any_source_": _receive_any,
    "barrier": _barrier,
}
