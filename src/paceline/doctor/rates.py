"""Measure the rates of a device that the planner needs: matrix products by shape, attention, memory
bandwidth, and the launch of an operation. Takes about 3 seconds on each kind of ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from paceline.core.files import human_bytes
from paceline.core.formatting import significant
from paceline.distributed.traffic import uncounted
from paceline.launch.passes.host_checks import CheckResult
from paceline.planner.machine.profile import DeviceRates, ProductCurve

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from paceline.distributed.communicator import Communicator

#: (rows, inputs, outputs) of the measured products. They are wide and narrow, with few and many
#: rows, so that the three constants of the curve are determined. Small ones are measured on CPUs
#: and slow accelerators.
_SMALL_SHAPES = (
    (64, 128, 384),
    (512, 128, 384),
    (128, 512, 512),
    (512, 512, 1536),
    (64, 1024, 1024),
    (256, 1024, 1024),
    (512, 256, 8192),
)
_LARGE_SHAPES = (
    (512, 1024, 1024),
    (8192, 1024, 1024),
    (512, 4096, 4096),
    (2048, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 4096, 14336),
    (4096, 8192, 8192),
)
#: An accelerator that takes longer for the products of the first large shape is slow. Below it,
#: shapes that would take longer than the second figure are left out.
_SLOW_S, _LONGEST_S = 0.005, 0.5
#: Time of each measurement, and the least number of repetitions.
_SHAPE_S, _MIN_REPEATS = 0.12, 3
#: On an accelerator as many calls are timed together as fit into this time, at most 10.
_TOGETHER_S, _MAX_TOGETHER = 0.02, 10
_MEMORY_BYTES = 1 << 26
_OPERATIONS, _TINY = 50, 64
#: Computations between which small all-reduces are measured.
_BUSY_CALLS = 100


def measure_rates(device: torch.device, num_ranks: int = 1) -> DeviceRates:
    """Measure this rank's device; on a CPU, with the threads that torch uses now."""
    import torch

    dtypes = [torch.float32]
    if device.type != "cpu":
        dtypes.append(torch.bfloat16)
    return DeviceRates(
        num_ranks=num_ranks,
        products={str(dtype).removeprefix("torch."): _curve(device, dtype) for dtype in dtypes},
        attention_flops_s=_attention(device, dtypes[-1]),
        memory_bytes_s=_memory_rate(device),
        operation_s=_operation_s(device),
    )


def measure_on_ranks(world: Communicator) -> list[DeviceRates]:
    """Measure all ranks at the same time, because the ranks of a CPU share memory and caches; on a
    CPU also rank 0 alone with all cores. A collective; returns the mean of the ranks, on all
    ranks."""
    per_host = max(1, world.size // max(1, len(set(world.gather_objects(_host())))))
    world.barrier()
    together = _mean(
        [
            each
            for each in world.gather_objects(measure_rates(world.device, per_host))
            if isinstance(each, DeviceRates)
        ]
    )
    if world.device.type != "cpu" or per_host == 1:
        return [together]
    alone = None
    if world.is_rank_zero:
        with _all_cores():
            alone = measure_rates(world.device, 1)
    first = world.gather_objects(alone)[0]
    assert isinstance(first, DeviceRates)
    return [first, together]


def busy_latency_s(world: Communicator) -> float:
    """Return the seconds that a small all-reduce adds to a sequence of computations: ranks wait for
    the slower one, and on a CPU for a thread that sends. A collective; the mean of the ranks."""
    import torch

    size = 256 if _is_slow(world.device) else 2048
    matrix = torch.ones(size, size, device=world.device)
    small = torch.zeros(1024, device=world.device)

    def compute() -> None:
        for _ in range(4):
            matrix @ matrix

    def compute_and_reduce() -> None:
        compute()
        world.wait(world.all_reduce(small))

    with uncounted():
        world.barrier()
        alone = _mean_seconds(world.device, compute)
        world.barrier()
        both = _mean_seconds(world.device, compute_and_reduce)
    return max(0.0, float(np.mean(world.gather_numbers(both - alone))))


def _mean_seconds(device: torch.device, work: Callable[[], None]) -> float:
    """Return the mean seconds of a call, over the same number of calls on all ranks."""
    work()
    start = time.perf_counter()
    for _ in range(_BUSY_CALLS):
        work()
    _synchronize(device)
    return (time.perf_counter() - start) / _BUSY_CALLS


def check_rates(rates: Sequence[DeviceRates]) -> list[CheckResult]:
    """Return the measurements as a check, which always passes."""
    if not rates:
        return []
    each = rates[-1]
    curves = ", ".join(
        f"{significant(curve.flops_s / 1e12)} TFLOP/s in {name}"
        for name, curve in each.products.items()
    )
    text = (
        f"matrix products {curves}; memory {human_bytes(each.memory_bytes_s)}/s;"
        f" {each.operation_s * 1e6:.1f} µs per operation; per rank"
    )
    return [CheckResult.passed("rates", text)]


def _host() -> str:
    from paceline.core.processes import host_name

    return host_name()


@contextmanager
def _all_cores() -> Iterator[None]:
    import torch

    from paceline.distributed.devices import cpu_cores

    before = torch.get_num_threads()
    torch.set_num_threads(cpu_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _mean(rates: Sequence[DeviceRates]) -> DeviceRates:
    """Return the mean of several ranks: the geometric one, as all figures are rates or factors."""

    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(np.maximum(values, 1e-12)))))

    products = {
        name: ProductCurve(
            *(
                mean([getattr(each.products[name], figure) for each in rates])
                for figure in ("flops_s", "row_loss", "width_loss")
            )
        )
        for name in rates[0].products
    }
    return replace(
        rates[0],
        products=products,
        attention_flops_s=mean([each.attention_flops_s for each in rates]),
        memory_bytes_s=mean([each.memory_bytes_s for each in rates]),
        operation_s=mean([each.operation_s for each in rates]),
    )


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Return the seconds of a call: the lower quartile within the time of a measurement, which
    short disturbances by other processes do not change. Several short calls are timed together on
    an accelerator, which is asynchronous."""
    work()
    _synchronize(device)
    together = 1
    if device.type != "cpu":
        together = min(_MAX_TOGETHER, max(1, int(_TOGETHER_S / _seconds_once(device, work))))
    times: list[float] = []
    started_at = time.perf_counter()
    while len(times) < _MIN_REPEATS or time.perf_counter() - started_at < _SHAPE_S:
        times.append(_seconds_once(device, work, together) / together)
    return sorted(times)[len(times) // 4]


def _seconds_once(device: torch.device, work: Callable[[], object], calls: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize()


def _products(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int]
) -> Callable[[], None]:
    """Return a function that computes the three products of a linear layer in training: of forward,
    of the gradient of the input, and of the gradient of the weight."""
    import torch

    rows, inputs, outputs = shape
    x = torch.randn(rows, inputs, device=device, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    gradient = torch.randn(rows, outputs, device=device, dtype=dtype)

    @torch.no_grad()
    def products() -> None:
        x @ weight.T
        gradient @ weight
        gradient.T @ x

    return products


def _is_slow(device: torch.device) -> bool:
    """Return whether large shapes would take too long on this device."""
    import torch

    if device.type == "cpu":
        return True
    return _first_seconds(device, torch.float32) > _SLOW_S


def _first_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds of the products of the first large shape."""
    products = _products(device, dtype, _LARGE_SHAPES[0])
    products()
    _synchronize(device)
    return _seconds_once(device, products)


def _shapes(device: torch.device, dtype: torch.dtype) -> Sequence[tuple[int, int, int]]:
    """Return the shapes to measure: those that take less than the longest time each, as far as the
    time of the first one shows."""
    if _is_slow(device):
        return _SMALL_SHAPES
    seconds_per_multiplication = _first_seconds(device, dtype) / math.prod(_LARGE_SHAPES[0])
    return [
        shape
        for shape in _LARGE_SHAPES
        if math.prod(shape) * seconds_per_multiplication <= _LONGEST_S
    ]


def _curve(device: torch.device, dtype: torch.dtype) -> ProductCurve:
    shapes = _shapes(device, dtype)
    times = [_seconds(device, _products(device, dtype, shape)) / 3 for shape in shapes]
    return fit_curve(shapes, times)


def fit_curve(shapes: Sequence[tuple[int, int, int]], times: Sequence[float]) -> ProductCurve:
    """Fit the curve to the seconds of products, by least squares of the relative error. The time
    is linear in 1 / flops_s, row_loss / flops_s and width_loss / flops_s."""
    from scipy.optimize import nnls

    flops = np.array([2.0 * rows * inputs * outputs for rows, inputs, outputs in shapes])
    matrix = np.array([[1, 1 / rows, 1 / inputs + 1 / outputs] for rows, inputs, outputs in shapes])
    relative = matrix * (flops / np.array(times))[:, None]
    solution, _ = nnls(relative, np.ones(len(flops)))
    seconds, per_row, per_width = (float(value) for value in solution)
    if seconds <= 0:  # every product is too small to tell the rate of a large one
        return ProductCurve(float(np.max(flops / np.array(times))), 0.0, 0.0)
    return ProductCurve(1 / seconds, per_row / seconds, per_width / seconds)


def _attention(device: torch.device, dtype: torch.dtype) -> float:
    import torch

    heads, length, width = (8, 256, 64) if _is_slow(device) else (32, 2048, 128)
    shape = (1, heads, length, width)
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )

    def work() -> None:
        attention = torch.nn.functional.scaled_dot_product_attention
        attention(query, key, value, is_causal=True).sum().backward()

    # Half of the scores; backward takes 2.5 times the operations of forward.
    flops = 3.5 * 2 * heads * width * length**2
    return flops / _seconds(device, work)


def _memory_rate(device: torch.device) -> float:
    import torch

    numel = _MEMORY_BYTES // 4 * (1 if device.type == "cpu" else 4)
    # Not zeros: pages that were never written share one page, which is in the cache.
    first, second, result = (torch.ones(numel, device=device) for _ in range(3))
    seconds = _seconds(device, lambda: torch.add(first, second, out=result))
    return 3 * 4 * numel / seconds


def _operation_s(device: torch.device) -> float:
    import torch

    weight = torch.randn(_TINY, device=device, requires_grad=True)

    def work() -> None:
        x = weight
        for _ in range(_OPERATIONS):
            x = x * weight
        x.sum().backward()

    return _seconds(device, work) / (2 * _OPERATIONS)
