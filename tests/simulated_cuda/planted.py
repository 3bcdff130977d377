"""Faults planted into the ranks of a run on simulated devices, and what finds each of them.

A fault replaces a few lines of the source. It is applied if the environment variable
:data:`VARIABLE` names it, before a rank creates its process group.
"""

import inspect
import os
import sys
import textwrap
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from stream_order.checker import FREED, MISSING_WAIT, PINNED

VARIABLE = "PACELINE_TEST_FAULT"
_SLOW_RANK_ZERO = Path(__file__).parents[1] / "rank_zero_task.py"


@dataclass(frozen=True)
class Replacement:
    """Parts of a function that are replaced.

    Args:
        module: name of the module.
        function: name of the function in it, such as ``Communicator.sum``.
        changes: parts of its source, each of which occurs once, and what replaces them.
    """

    module: str
    function: str
    changes: dict[str, str]

    def apply(self) -> None:
        """Replace the function in its class, or in all modules that have imported it."""
        owner = import_module(self.module)
        *parents, name = self.function.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        original = inspect.unwrap(getattr(owner, name))
        source = textwrap.dedent(inspect.getsource(original))
        for before, after in self.changes.items():
            if source.count(before) != 1:
                raise ValueError(f"the source of {self.function} does not have once: {before}")
            source = source.replace(before, after)
        code = compile(source, f"planted in {self.module}", "exec")
        made: dict[str, object] = {}
        exec(code, original.__globals__, made)
        current = getattr(owner, name)
        setattr(owner, name, made[name])
        for module in () if parents else tuple(sys.modules.values()):
            if getattr(module, "__dict__", {}).get(name) is current:
                setattr(module, name, made[name])


@dataclass(frozen=True)
class Fault:
    """A fault, a run that it breaks, and what finds it.

    Args:
        replacement: the change of the source.
        args: settings of the run, in addition to the settings of the model.
        finding: a part of the run's standard error, or of the error of
            :func:`nccl_orders.compare_orders`; None: the losses are not those without the fault.
        fails: whether the run fails.
    """

    replacement: Replacement
    args: tuple[str, ...]
    finding: str | None
    fails: bool = True


def _ddp(*args: str) -> tuple[str, ...]:
    return "parallel.mode=ddp", "parallel.num_gpus=2", *args


_MODIFIED = "a tensor of a collective was modified between its issue and the wait"
_ORDERS = "issued their collectives in different orders"

#: Faults that the backend with NCCL's rules finds.
NCCL_FAULTS: dict[str, Fault] = {
    # -- a wait is missing
    "gradients are not waited for": Fault(
        Replacement(
            "paceline.parallel.buckets.gradients",
            "GradientBuckets.finish",
            {"self.world.wait(bucket.work)": "pass"},
        ),
        _ddp(),
        _MODIFIED,
    ),
    "sums of activations are not waited for": Fault(
        Replacement(
            "paceline.strategies.tensor.ops",
            "_all_reduced",
            {"group.wait(group.all_reduce(result))": "group.all_reduce(result)"},
        ),
        ("parallel.mode=tensor", "parallel.num_gpus=2"),
        None,
        fails=False,
    ),
    "hidden states are not waited for": Fault(
        Replacement(
            "torch.distributed.pipelining.schedules", "_wait_batch_p2p", {"w.wait()": "pass"}
        ),
        ("parallel.mode=pipeline", "parallel.num_gpus=2", "gradient_accumulation_steps=4"),
        None,
        fails=False,
    ),
    # -- the order of the communicators differs between ranks
    "groups are created in another order": Fault(
        Replacement(
            "paceline.strategies.hybrid.strategy",
            "HybridStrategy.setup",
            {
                "):\n        self.world.subgroup(*names)": (
                    ")[:: 1 - 2 * (self.world.rank % 2)]:\n        self.world.subgroup(*names)"
                )
            },
        ),
        (
            "parallel.mode=hybrid", "parallel.num_gpus=4", "parallel.data=2", "parallel.tensor=2",
            "parallel.collective_timeout_s=10",
        ),
        _ORDERS,
    ),
    "a sum of all ranks runs beside the reducer's thread": Fault(
        Replacement(
            "paceline.parallel.buckets.gradients",
            "GradientBuckets.finish",
            {
                "for bucket in self.buckets:": (
                    "self.world.sum(0.0)\n    for bucket in self.buckets:"
                )
            },
        ),
        _ddp("parallel.all_reduce_algorithm=ring", "parallel.bucket_cap_mb=0.05"),
        _ORDERS,
    ),
    # -- NCCL refuses a tensor
    "a sum of numbers in host memory": Fault(
        Replacement(
            "paceline.distributed.communicator",
            "Communicator.sum",
            {"device=self.device": 'device="cpu"'},
        ),
        _ddp(),
        "No backend type associated with device type cpu",
    ),
    "a sum of numbers with strides": Fault(
        Replacement(
            "paceline.distributed.communicator",
            "Communicator.gather_numbers",
            {
                "torch.zeros(self.size, dtype=self.wide_dtype, device=self.device)": (
                    "torch.zeros(self.size, 2, dtype=self.wide_dtype, device=self.device)[:, 0]"
                )
            },
        ),
        _ddp(),
        "Tensors must be contiguous",
    ),
    # -- rank 0 works alone
    "ranks wait for rank 0 in a collective": Fault(
        Replacement(
            "paceline.distributed.rank_zero",
            "rank_zero_phase",
            {
                'store.set(f"{key}/done", "yes")': "comm.barrier()",
                "_wait(comm, store, key, leader, doing)": "comm.barrier()",
            },
        ),
        (
            "model=linear", "dataset=made-by-the-task", f"task={_SLOW_RANK_ZERO}:SlowRankZero",
            "parallel.num_gpus=2", "parallel.collective_timeout_s=10", "save_steps=0",
            "per_device_train_batch_size=2", "task_args.slow=save_model", "task_args.seconds=13",
        ),
        "Watchdog caught collective operation timeout",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class StreamFault:
    """A fault that does not change the values of simulated devices, and what the checker of streams
    finds.

    Args:
        args: settings of the run, in addition to the settings of the model; None: the fault is
            found in a program of ``stream_programs.PROGRAMS``, because in the runs something else
            waits.
        kind: the kind of the finding; see :mod:`stream_order.checker`.
        site: a part of a finding of this kind.
    """

    replacement: Replacement
    args: tuple[str, ...] | None
    kind: str
    site: str


_OFFLOADS_STATE = _ddp("parallel.cpu_offload=optimizer")
_OFFLOADS_ACTIVATIONS = _ddp("parallel.cpu_offload=activations")

#: Faults that the checker of streams finds.
STREAM_FAULTS: dict[str, StreamFault] = {
    # -- a wait is missing
    "an update does not wait for the optimizer's state": StreamFault(
        Replacement(
            "paceline.train.optimizers.host_state",
            "_Copies.wait_for_fetch",
            {"self._to_device.wait(self._fetching[1])": "pass"},
        ),
        _OFFLOADS_STATE,
        MISSING_WAIT,
        "train/optimizers/host_state.py",
    ),
    "the thread of the reducer does not wait for the gradients": StreamFault(
        Replacement(
            "paceline.distributed.comm_thread", "_run", {"stream.wait_event(ready)": "pass"}
        ),
        _ddp("compression.method=topk", "compression.ratio=0.1"),
        MISSING_WAIT,
        "strategies/reducers/compression/reducer.py",
    ),
    # -- an event is on the wrong stream
    "the event of a copy to the host is on the current device's stream": StreamFault(
        Replacement(
            "paceline.distributed.host_copies",
            "HostCopy.__init__",
            {
                "torch.accelerator.current_stream(tensor.device)": (
                    "torch.accelerator.current_stream()"
                )
            },
        ),
        None,
        PINNED,
        "Tensor.tolist",
    ),
    "the mark of a copy is on the current stream": StreamFault(
        Replacement(
            "paceline.distributed.host_copies",
            "CopyStream.mark",
            {
                "self._stream.record_event()": (
                    "torch.accelerator.current_stream(self.device).record_event()"
                )
            },
        ),
        _OFFLOADS_ACTIVATIONS,
        FREED,
        "distributed/host_copies.py",
    ),
    # -- memory is freed too early
    "the optimizer's state is freed while it is copied": StreamFault(
        Replacement(
            "paceline.train.optimizers.host_state",
            "_Copies.wait_for_store",
            {"self._to_host.wait(event)": "pass"},
        ),
        _OFFLOADS_STATE,
        FREED,
        "distributed/host_copies.py",
    ),
    "activations are freed while they are copied": StreamFault(
        Replacement(
            "paceline.models.transforms.activation_offloading",
            "ActivationOffloader.run",
            {"self._stream.wait(previous.copied)": "pass"},
        ),
        _OFFLOADS_ACTIVATIONS,
        FREED,
        "distributed/host_copies.py",
    ),
    # -- pinned memory is used again too early
    "a checkpoint is written while it is copied": StreamFault(
        Replacement(
            "paceline.checkpoint.staging",
            "StagingBuffer.copy",
            {"torch.accelerator.synchronize(self.device)": "pass"},
        ),
        None,
        PINNED,
        "Tensor.numpy",
    ),
    "figures are read while they are copied": StreamFault(
        Replacement(
            "paceline.distributed.host_copies",
            "HostCopy.read",
            {"self._event.synchronize()": "pass"},
        ),
        _ddp("logging_steps=1"),
        PINNED,
        "distributed/host_copies.py",
    ),
    "the optimizer's state is copied back while it is copied to the host": StreamFault(
        Replacement(
            "paceline.train.optimizers.host_state",
            "_Copies.wait_for_store",
            {"event.synchronize()": "pass", "self._to_host.wait(event)": "pass"},
        ),
        _OFFLOADS_STATE,
        MISSING_WAIT,
        "distributed/host_copies.py",
    ),
}
FAULTS: dict[str, Fault | StreamFault] = NCCL_FAULTS | STREAM_FAULTS
_applied: set[str] = set()


def plant() -> None:
    """Apply the fault that the environment names, once."""
    name = os.environ.get(VARIABLE)
    if name is None or name in _applied:
        return
    _applied.add(name)
    FAULTS[name].replacement.apply()
