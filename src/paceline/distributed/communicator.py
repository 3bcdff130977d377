"""The process group of a run, its subgroups along the axes of the mesh, and their collectives."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from paceline.core.errors import RunError
from paceline.distributed import torch_compat
from paceline.distributed.devices import cpu_cores, expands_segments
from paceline.distributed.environment import RankEnv
from paceline.distributed.mesh import ParallelDims
from paceline.distributed.timing.progress import COLLECTIVE, PROGRESS
from paceline.distributed.torch_compat import set_allocator_settings
from paceline.distributed.traffic import Traffic, count_collectives

T = TypeVar("T")

#: Constants from glibc's <malloc.h>.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
#: DEFAULT_MMAP_THRESHOLD_MAX on 64-bit systems. glibc rejects larger thresholds.
_LARGEST_MMAP_THRESHOLD = 32 << 20
_KEPT_BYTES = 1 << 30


class Waitable(Protocol):
    """Communication in progress: a `torch.distributed.Work` or a :class:`PendingComm`."""

    def wait(self) -> object: ...


class CommWaitTime:
    """Seconds that this rank has waited for communication."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Communicator:
    """This rank, its device, and the collectives of one group: all ranks, or a subgroup of the
    mesh. With one rank, every collective is the identity.

    Args:
        env: rank and sizes within this group.
        device: device on which this rank computes.
        axes: sizes of the mesh; default: all ranks on the data axis.
        group: process group, or None for all ranks.
        ranks: global rank of each member, in order.
        waits: counter of the seconds waited, shared by all subgroups of a rank.
    """

    def __init__(
        self,
        env: RankEnv,
        device: torch.device,
        axes: ParallelDims | None = None,
        group: dist.ProcessGroup | None = None,
        ranks: list[int] | None = None,
        waits: CommWaitTime | None = None,
    ) -> None:
        self.env = env
        self.device = device
        self.axes = axes or ParallelDims(data=env.world_size)
        self.group = group
        self.ranks = ranks if ranks is not None else list(range(env.world_size))
        self.waits = waits or CommWaitTime()
        self._subgroups: dict[tuple[str, ...], Communicator] = {}
        #: Device types of the ranks of the mesh.
        self.device_types = frozenset({device.type})

    @property
    def mixes_devices(self) -> bool:
        """Whether the ranks of the mesh have devices of different types. If so, all ranks use
        Gloo."""
        return len(self.device_types) > 1

    #: The process group existed before the run, and its creator closes it.
    has_adopted_group = False
    #: Time limit of collectives; None: torch's.
    timeout: timedelta | None = None
    #: How long the other ranks wait for rank 0 while it works alone and makes no progress; see
    #: :mod:`paceline.distributed.rank_zero`.
    rank0_timeout_s = 3600.0
    #: The other ranks exist: not in a simulation, in which one process is one rank of many.
    has_peers = True

    @property
    def traffic(self) -> Traffic:
        return count_collectives()

    @property
    def wait_s(self) -> float:
        """Seconds that this rank has waited for communication, in any group."""
        return self.waits.seconds

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def size(self) -> int:
        return self.env.world_size

    @property
    def first(self) -> int:
        """The rank that logs and writes files."""
        return 0

    @property
    def is_rank_zero(self) -> bool:
        return self.env.rank == self.first

    @property
    def lost(self) -> frozenset[int]:
        """Ranks that were lost while the others continue."""
        return frozenset()

    def has_ended(self, rank: int) -> bool:
        """Return whether a rank is known to have ended while the others continue."""
        return rank in self.lost

    @property
    def coordinates(self) -> dict[str, int]:
        """This rank's coordinate on each axis of the mesh."""
        return self.axes.coordinates(self.ranks[self.rank])

    def subgroup(self, *axes: str) -> Communicator:
        """Return a communicator of the ranks whose coordinates differ from this rank's coordinates
        only in ``axes``.

        The first call for a set of axes is a collective of all ranks, which creates the groups.
        """
        key = tuple(sorted(axes))
        if key not in self._subgroups:
            groups = self.axes.subgroups(key)
            is_all = len(groups[0]) == self.size
            self._subgroups[key] = self if is_all else self.split(groups, self.waits)
        return self._subgroups[key]

    def split(
        self,
        groups: Sequence[Sequence[int]],
        waits: CommWaitTime | None = None,
        timeout_s: float | None = None,
        backend: str | None = None,
    ) -> Communicator:
        """Create a process group for each of ``groups``. Return this rank's group. A collective.

        Args:
            groups: ranks of each group; every rank is in exactly one.
            waits: counter of the seconds waited; default: a new one.
            backend: backend of the new groups; default: the backend of all ranks.
        """
        timeout = self.timeout if timeout_s is None else timedelta(seconds=timeout_s)
        for ranks in groups:  # every rank takes part in the creation of every group
            members = [self.ranks[rank] for rank in ranks]
            group = None
            if len(members) > 1:
                group = new_group(members, timeout, backend)
            if self.rank in ranks:
                env = replace(self.env, rank=ranks.index(self.rank), world_size=len(members))
                local = type(self)(env, self.device, self.axes, group, members, waits)
        return local

    def all_reduce(
        self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> dist.Work | None:
        """Start an in-place all-reduce. Pass the returned work (None with one rank) to
        :meth:`wait`."""
        if self.size == 1:
            return None
        return cast(dist.Work, dist.all_reduce(tensor, op=op, group=self.group, async_op=True))

    def reduce_scatter(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work | None:
        """Start a reduce-scatter: sum ``tensor`` [N × n] over the ranks, and write this rank's part
        of the sum to ``output`` [n]."""
        if self.size == 1:
            output.copy_(tensor)
            return None
        names = "reduce_scatter_single", "reduce_scatter_tensor"
        return _start(names, output, tensor, self.group)

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> dist.Work | None:
        """Start an all-gather of each rank's ``tensor`` [n] into ``output`` [N × n]."""
        if self.size == 1:
            output.copy_(tensor)
            return None
        names = "all_gather_single", "all_gather_into_tensor"
        return _start(names, output, tensor, self.group)

    def all_to_all(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        received_sizes: list[int] | None = None,
        sent_sizes: list[int] | None = None,
    ) -> dist.Work | None:
        """Start to send a part of ``tensor`` to each rank and to receive ``output``: rows in rank
        order, as many as the sizes tell, or equal parts."""
        if self.size == 1:
            output.copy_(tensor)
            return None
        sizes = {"output_split_sizes": received_sizes, "input_split_sizes": sent_sizes}
        work = dist.all_to_all_single(output, tensor, **sizes, group=self.group, async_op=True)
        return cast(dist.Work, work)

    def wait(self, work: Waitable | None) -> None:
        """Wait for a collective, and add the seconds to :attr:`wait_s`."""
        if work is None:
            return
        start = time.perf_counter()
        with PROGRESS.waiting(COLLECTIVE):
            work.wait()
        self.waits.seconds += time.perf_counter() - start

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of a collective on the CPU. On an accelerator, :meth:`wait` only
        enqueues the wait, so that the host waits for the other ranks here."""
        with PROGRESS.waiting(COLLECTIVE):
            return tensor.cpu()

    def sum(self, *values: float) -> list[float]:
        """Sum each value over the ranks, in float64 if the device supports it."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(values, dtype=self.wide_dtype, device=self.device)
        self.wait(self.all_reduce(tensor))
        return [float(value) for value in self.read(tensor).tolist()]

    @property
    def wide_dtype(self) -> torch.dtype:
        """The widest floating-point dtype that the device supports."""
        return wide_dtype(self.device)

    def broadcast(self, tensors: Iterable[torch.Tensor], chunk_bytes: int = 64 << 20) -> None:
        """Copy rank 0's values into every rank's tensors, in place. Small tensors of one dtype are
        sent together."""
        if self.size == 1:
            return
        groups: dict[torch.dtype, list[torch.Tensor]] = {}
        sizes: dict[torch.dtype, int] = {}
        for tensor in tensors:
            if sizes.get(tensor.dtype, 0) > chunk_bytes:
                self._broadcast_group(groups.pop(tensor.dtype))
                sizes[tensor.dtype] = 0
            groups.setdefault(tensor.dtype, []).append(tensor)
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
        for group in groups.values():
            self._broadcast_group(group)

    def _broadcast_group(self, tensors: list[torch.Tensor]) -> None:
        with torch.no_grad():
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).to(self.device)
            dist.broadcast(flat, src=self.ranks[0], group=self.group)
            if self.rank != 0:
                parts = flat.split([tensor.numel() for tensor in tensors])
                for tensor, part in zip(tensors, parts, strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def broadcast_object(self, value: T) -> T:
        """Return rank 0's value (a small picklable object) on every rank."""
        if self.size == 1:
            return value
        box = [value]
        device = torch.device("cpu") if dist.get_backend(self.group) == "gloo" else self.device
        with PROGRESS.waiting(COLLECTIVE):
            dist.broadcast_object_list(box, src=self.ranks[0], group=self.group, device=device)
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """Return the (small, picklable) objects of all ranks, ordered by rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[T] = [value] * self.size
        with PROGRESS.waiting(COLLECTIVE):
            dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_numbers(self, value: float) -> list[float]:
        """Return the values of all ranks, ordered by rank, on every rank."""
        if self.size == 1:
            return [float(value)]
        tensor = torch.zeros(self.size, dtype=self.wide_dtype, device=self.device)
        tensor[self.rank] = value
        self.wait(self.all_reduce(tensor))
        return [float(number) for number in self.read(tensor).tolist()]

    def barrier(self) -> None:
        if self.size > 1:
            self.sum(0.0)

    def close(self) -> None:
        """Destroy this process group, unless it uses Gloo or existed before the run.

        Destroying a Gloo group joins its threads, which can deadlock on the GIL that the caller
        holds. It is not needed: every rank has passed the last barrier, and the sockets close with
        the process.
        """
        if self.has_adopted_group or not dist.is_initialized():
            return
        if dist.get_backend(self.group) != "gloo":
            dist.destroy_process_group(self.group)


def new_group(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None
) -> Any:
    """Create a process group of these ranks. A collective of all ranks.

    Args:
        backend: backend of the new group; default: the backend of all ranks.
    """
    # torch splits the communicator of a default group that is bound to a device, which is a
    # collective of all ranks. Members of a Gloo group do not take part, so the others would hang.
    default = dist.group.WORLD
    device = None if backend != "gloo" else getattr(default, "bound_device_id", None)
    if device is None:
        return dist.new_group(ranks, timeout=timeout, backend=backend)
    default.bound_device_id = None  # type: ignore[union-attr]
    try:
        return dist.new_group(ranks, timeout=timeout, backend=backend)
    finally:
        default.bound_device_id = device  # type: ignore[union-attr]


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point dtype that a device supports."""
    return torch.float32 if device.type == "mps" else torch.float64


def init_communicator(
    env: RankEnv,
    device_type: str,
    timeout_s: float,
    axes: ParallelDims | None = None,
    rank0_timeout_s: float = Communicator.rank0_timeout_s,
) -> Communicator:
    """Choose this rank's device, set the number of threads, and join the process group.

    The backend is torch's default for the device (nccl, gloo, xccl…), or Gloo if the ranks have
    devices of different types. CPU ranks of one host share its cores evenly. If a process group
    already exists, it is used: Ray Train creates one before it calls the training function, and a
    script may do so too.

    Args:
        device_type: device type of the ranks of the mesh. The ranks after them, such as the
            servers of a parameter server, use the CPU.
        axes: sizes of the mesh; default: all ranks on the data axis.
        rank0_timeout_s: see :attr:`Communicator.rank0_timeout_s`.

    Raises:
        RunError: if the existing process group has other ranks, or a backend that does not support
            the device.
    """
    Communicator.rank0_timeout_s = rank0_timeout_s
    mesh_types = device_types = frozenset({device_type})
    num_mesh_ranks = env.world_size if axes is None else axes.size
    if num_mesh_ranks < env.world_size:
        device_types |= {"cpu"}
        device_type = device_type if env.rank < num_mesh_ranks else "cpu"
    tune_allocator(device_type)
    set_cpu_threads(env.local_world_size)
    if device_type == "cpu":
        device = torch.device("cpu")
    else:
        device = torch.device(device_type, env.local_rank)
        torch.accelerator.set_device_index(env.local_rank)
    if env.world_size > 1 and dist.is_initialized():
        _check_adopted(env, device)
        Communicator.has_adopted_group, Communicator.timeout = True, None
    elif env.world_size > 1:
        Communicator.has_adopted_group = False
        timeout = Communicator.timeout = timedelta(seconds=timeout_s)
        store: dist.Store | None = None
        if env.local_world_size < env.world_size:
            root, _, _ = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))
            root.set_timeout(timeout)
            store = dist.PrefixStore("default_pg", root)
            mesh_types = device_types = _exchange_device_types(
                dist.PrefixStore("device_types", root), env.world_size, device_type
            )
        backend = dist.get_default_backend_for_device(device) if len(device_types) == 1 else "gloo"
        uses_device = device.type != "cpu" and backend != "gloo"
        if uses_device:
            os.environ.setdefault(
                torch_compat.flight_recorder_variable(), _FLIGHT_RECORDER_COLLECTIVES
            )
        dist.init_process_group(
            backend,
            rank=env.rank,
            world_size=env.world_size,
            timeout=timeout,
            store=store,
            device_id=device if uses_device else None,
        )
    count_collectives()
    world = Communicator(env, device, axes)
    world.device_types = mesh_types
    return world


def _exchange_device_types(store: dist.Store, world_size: int, device_type: str) -> frozenset[str]:
    """Return the device types of all ranks. They determine the backend of the process group."""
    store.append("types", f"{device_type} ")  # type: ignore[attr-defined]
    if store.add("ranks", 1) == world_size:
        store.set("complete", "1")
    store.wait(["complete"])
    return frozenset(store.get("types").decode().split())


def _check_adopted(env: RankEnv, device: torch.device) -> None:
    """Raise RunError if this rank cannot use the existing process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (env.rank, env.world_size):
        raise RunError(
            "this process is rank {rank} of {size} in the existing process group, but rank"
            " {env_rank} of {world_size} in the environment",
            code="process-group-mismatch",
            fix="call `torch.distributed.destroy_process_group()` before `paceline.train()`, which"
            " creates a process group",
            rank=rank,
            size=size,
            env_rank=env.rank,
            world_size=env.world_size,
        )
    backends = {part.rpartition(":")[2] for part in str(dist.get_backend_config()).split(",")}
    needed = dist.get_default_backend_for_device(device)
    if needed not in backends:
        raise RunError(
            "the existing process group uses {backends}, but {type} requires {needed}",
            code="process-group-backend",
            fix="create it with `backend={backend}`, or set `parallel.device` to a device that it"
            " supports",
            backends=", ".join(sorted(backends)),
            type=device.type,
            needed=needed,
            backend=f"{needed!r}",
        )


#: Number of collectives in torch's flight recorder, which the watchdog dumps if a rank hangs.
_FLIGHT_RECORDER_COLLECTIVES = "2000"


def _start(
    names: tuple[str, str],
    output: torch.Tensor,
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> dist.Work:
    """Start a collective. Older releases of torch have it only under the second name."""
    function = getattr(dist, names[0], None) or getattr(dist, names[1])
    return cast(dist.Work, function(output, tensor, group=group, async_op=True))


def tune_allocator(device_type: str) -> None:
    """Tune garbage collection and memory allocation. Called once a rank has imported its modules.

    Existing objects are excluded from garbage collection (:func:`gc.freeze`). Otherwise a full
    collection within a step would visit a million objects and, in a forked rank, copy every page
    that it touches (measured: 21,000 page faults and half a second).

    When training on a CPU, the process keeps up to 1 GiB of memory that a step frees. By default
    glibc's malloc returns it to the system, which then clears every page that is allocated again.
    Settings in the environment and other allocators are respected.

    On CUDA, segments of the caching allocator grow instead of being joined by new ones, so that
    rows of changing length do not fragment the memory (:func:`expands_segments`). Larger blocks of
    pinned host memory are not rounded up to a power of two, if this torch has the setting.
    """
    gc.freeze()
    if expands_segments(device_type):
        set_allocator_settings("expandable_segments:True", "pinned_max_round_threshold_mb:16")
    if device_type == "cpu" and not any(
        name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ
    ):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
            mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def set_cpu_threads(local_world_size: int) -> None:
    """Set the number of threads of a rank's CPU operations to its share of the cores, unless
    OMP_NUM_THREADS is set."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(max(1, cpu_cores() // local_world_size))
