"""Fit the constants of the planner's time model to published results.

The fit minimizes the squared logarithm of predicted / published time, with a robust loss, and the
squared distance of each constant's logarithm from that of a prior, in units of the prior's width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from assumed.memory_parts import AssumedMemory, memory_parts
from assumed.memory_total import MemoryCoefficients, memory_bytes, memory_factors
from planner_rows import Row
from scipy.optimize import least_squares

from paceline.planner.devices import Device
from paceline.planner.machine.profile import DeviceRates, MeasuredLink, ProductCurve
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.constants import Factors, cpu_factors, factors_of, on_cpu
from paceline.planner.time.rates import Rates, cpu_rates, curve_of, rates_of
from paceline.planner.time.step import Coefficients, step_time
from paceline.planner.time.work import RankWork, count_work

Array = npt.NDArray[np.float64]

#: Sources of priors.
_COUNTED = "counted: reads and writes of the operations of a block"
_GUESS = "order of magnitude"
_MAMF = "stas00/ml-engineering, compute/accelerator/README.md: maximum achievable matmul FLOPS"
_FLASH_2 = "Dao, FlashAttention-2, 2023, section 4.1: 50 to 73 % of an A100's peak"
_FLASH_3 = (
    "Shah et al., FlashAttention-3, 2024, section 1: FlashAttention-2 reaches 35 % of an H100"
)
_NCCL = "NVIDIA/nccl-tests, doc/PERFORMANCE.md: bus bandwidth"
_OVERLAP = "PyTorch FSDP (Zhao et al., 2023, section 4): prefetching; share as a guess"


@dataclass(frozen=True)
class Prior:
    """The prior of a constant: log-normal.

    Args:
        median: most likely value.
        width: a factor of e^width either way is one standard deviation.
    """

    median: float
    width: float
    source: str = _GUESS


#: Priors of the constants of the time model.
PRIORS: dict[str, Prior] = {
    "products": Prior(0.85, 0.05, "sustained by a training step, of the best product alone"),
    "products: fp8": Prior(0.85, 0.15),
    "attention: up to Ada": Prior(0.6, 0.25, _FLASH_2),
    "attention: Hopper and later": Prior(0.4, 0.25, _FLASH_3),
    "attention: narrow heads": Prior(0.8, 0.2, _FLASH_2),
    "attention: flash-1": Prior(
        0.55, 0.15, "Dao, FlashAttention-2, 2023, abstract: 2 times as fast"
    ),
    "loss: rows": Prior(300.0, 0.5),
    "loss: widths": Prior(150.0, 0.5),
    "loss: fp8": Prior(1.3, 0.3),
    "stream: eager": Prior(2.3, 0.15, _COUNTED),
    "stream: eager-2023": Prior(2.5, 0.3, _COUNTED),
    "stream: compiled": Prior(1.6, 0.2, _COUNTED),
    "stream: fused": Prior(1.0, 0.4, _COUNTED),
    "stream: native": Prior(0.8, 0.4, _COUNTED),
    "stream: fp8 by tensor": Prior(2.0, 0.4, _COUNTED),
    "stream: fp8 by row": Prior(4.0, 0.4, _COUNTED),
    "stream: fp8 by block": Prior(3.0, 0.4, _COUNTED),
    "logits": Prior(1.0, 0.3, _COUNTED),
    "logits: fused": Prior(0.5, 0.3, _COUNTED),
    "dequantize": Prior(1.5, 0.3, _COUNTED),
    "dequantize: 2023": Prior(2.7, 0.3, "counted: codes unpacked by separate operations"),
    "optimizer": Prior(1.2, 0.3, _COUNTED),
    "launch: eager": Prior(0.8e-3, 0.3),
    "launch: eager-2023": Prior(1.0e-3, 0.3),
    "launch: compiled": Prior(0.4e-3, 0.3),
    "launch: fused": Prior(0.5e-3, 0.3),
    "launch: sharded": Prior(1.3, 0.2),
    "launch: adapters": Prior(1.8, 0.2),
    "link: NVLink": Prior(0.6, 0.25, _NCCL),
    "link: PCIe": Prior(0.5, 0.4, _NCCL),
    "link: tensor": Prior(1.0, 0.25),
    "network": Prior(0.8, 0.2, _NCCL),
    "network: decay": Prior(0.04, 0.5),
    "latency: tensor": Prior(25e-6, 0.5),
    "latency: shards": Prior(25e-6, 0.5),
    "latency: gradients": Prior(
        0.3e-3, 0.7, "buckets of gradients × the latency of a network card"
    ),
    "tensor: exposed": Prior(1.0, 0.05),
    "tensor: async": Prior(0.4, 0.4),
    "overlap: shards": Prior(0.75, 0.15, _OVERLAP),
    "overlap: cost": Prior(0.2, 0.4, _OVERLAP),
    "overlap: gradients": Prior(
        0.6, 0.3, "the part of backward that is left after the first bucket"
    ),
    "gather: exposed": Prior(0.6, 0.4),
    "pipeline: hop": Prior(0.6, 0.5),
    "pipeline: bubble": Prior(1.0, 0.1, "Narayanan et al., 2021, section 2.2"),
    "host copy": Prior(1.0, 0.1),
    "overhead": Prior(10e-3, 0.5),
}
#: Chip → best measured share of the data sheet's rate, of large matrix products alone.
BEST_PRODUCTS = {
    "A100": Prior(0.86, 0.08, _MAMF),
    "H100": Prior(0.803, 0.08, _MAMF),
    "B200": Prior(0.776, 0.08, _MAMF),
    "MI300X": Prior(0.60, 0.08, _MAMF),
}
#: The same of chips without a measurement, by family.
FAMILY_PRODUCTS = {
    "data center": Prior(0.8, 0.2),
    "workstation": Prior(0.8, 0.2),
    "GeForce": Prior(1.1, 0.2, "clocks above those of the data sheet"),
    "Instinct": Prior(0.65, 0.2),
}
#: Priors of the constants of the memory model.
MEMORY_PRIORS: dict[str, Prior] = {
    "memory: state": Prior(1.0, 0.02, "bytes of each tensor"),
    "memory: gathered": Prior(1.0, 0.3, "bytes of each tensor"),
    "memory: eager": Prior(1.0, 0.15, "bytes of each tensor"),
    "memory: fused": Prior(1.0, 0.1, "bytes of each tensor"),
    "memory: temporary": Prior(1.0, 0.2, "bytes of each tensor"),
    "memory: reserved": Prior(1.05, 0.03, "reserved of allocated memory in the rows of SimuMax"),
    "memory: workspaces": Prior(0.5 * 2**30, 0.5, "cuBLAS and NCCL"),
    "memory: context": Prior(1.0 * 2**30, 0.5, "CUDA context, cuBLAS and NCCL"),
}
#: Priors of the constants of CPU ranks, relative to the rates that `paceline doctor` measures.
CPU_PRIORS: dict[str, Prior] = {
    "cpu: products": Prior(1.0, 0.1, "measured alone"),
    "cpu: attention": Prior(1.0, 0.3, "measured alone"),
    "cpu: stream": Prior(2.3, 0.5, _COUNTED),
    "cpu: logits": Prior(1.0, 0.5, _COUNTED),
    "cpu: optimizer": Prior(1.2, 0.3, _COUNTED),
    "cpu: operations": Prior(50.0, 0.5, "operations of a layer's forward pass, counted"),
    "cpu: copies": Prior(
        20.0, 0.7, "copies of a message by Gloo and the kernel, each with cache misses"
    ),
    "cpu: messages": Prior(1.0, 0.5, "measured between computations"),
    "cpu: sharded": Prior(1.3, 0.5, "FSDP copies shards and runs hooks beside each message"),
    "cpu: overlap": Prior(0.5, 0.5),
    "cpu: bubble": Prior(0.9, 0.3, "Narayanan et al., 2021; a rank is faster while others idle"),
    "cpu: overhead": Prior(10e-3, 0.5),
}
#: Scale of errors: that of the published figures and of the model.
_SCALE = 0.08
_MEMORY_SCALE = 0.05
#: A project counts like this power of the number of its rows.
_POWER = 0.5


def chip_prior(device: Device) -> Prior:
    """Return the prior of a chip's share of its data sheet's rate."""
    return BEST_PRODUCTS.get(device.chip) or FAMILY_PRODUCTS[device.family]


@dataclass(frozen=True)
class CpuRow:
    """A measured run on CPU ranks, with the rates that were measured there.

    Args:
        project: what is left out of a fit together: the size of the model.
    """

    name: str
    project: str
    setup: TrainingSetup
    rates: DeviceRates
    link: MeasuredLink
    step_s: float

    @property
    def curve(self) -> ProductCurve:
        curve = curve_of(self.rates, None)
        assert curve is not None
        return curve

    @property
    def reached_rates(self) -> Rates:
        assert self.link.bandwidth_bytes_s is not None
        bandwidth, latency_s = self.link.bandwidth_bytes_s, self.link.message_s
        return cpu_rates(self.rates, self.curve, bandwidth, latency_s)


class _Problem:
    """Published figures of rows, and the constants that the prediction of each depends on."""

    #: Whether rows that the model does not explain count little.
    is_robust = True

    def __init__(
        self, rows: Sequence[Any], priors: dict[str, Prior], factors: list[Factors], scale: float
    ) -> None:
        self.rows, self.priors, self.scale = rows, priors, scale
        self.names = list(priors)
        index = {name: number for number, name in enumerate(self.names)}
        self.maps = {}
        self.used = np.zeros((len(rows), len(index)))
        for coefficient in factors[0]:
            matrix, is_used = np.zeros((len(rows), len(index))), np.ones(len(rows))
            for number, used in enumerate(factor[coefficient] for factor in factors):
                is_used[number] = bool(used)
                for name in used:
                    matrix[number, index[name]] += 1
            self.maps[coefficient] = (matrix, is_used)
            self.used += matrix

    def predict(self, constants: Mapping[str, float]) -> Array:
        """Return the prediction for each row."""
        return self._predict(np.log([constants[name] for name in self.names]))

    def published(self) -> Array:
        raise NotImplementedError

    def _evaluate(self, coefficients: dict[str, Array]) -> Array:
        raise NotImplementedError

    def _predict(self, logarithms: Array) -> Array:
        return self._evaluate(
            {
                name: np.exp(matrix @ logarithms) * is_used
                for name, (matrix, is_used) in self.maps.items()
            }
        )

    def fit(self, selected: Array) -> dict[str, float]:
        """Return the constants fitted to the selected rows."""
        medians = np.log([prior.median for prior in self.priors.values()])
        widths = np.array([prior.width for prior in self.priors.values()])
        weights, published = self._weights(selected), self.published()

        def residuals(logarithms: Array) -> Array:
            errors = np.log(self._predict(logarithms) / published) / self.scale
            if self.is_robust:  # Cauchy
                errors = np.sign(errors) * np.sqrt(np.log1p(errors**2))
            return np.concatenate([errors * weights, (logarithms - medians) / widths])

        solution = least_squares(residuals, medians, method="trf", x_scale=widths, max_nfev=60)
        return dict(zip(self.names, np.exp(solution.x).tolist(), strict=True))

    def _weights(self, selected: Array) -> Array:
        counts: dict[str, int] = {}
        for row, is_selected in zip(self.rows, selected, strict=True):
            counts[row.project] = counts.get(row.project, 0) + int(is_selected)
        weights = [max(1, counts[row.project]) ** (_POWER - 1) for row in self.rows]
        return np.sqrt(np.array(weights) * selected)

    def rows_of(self, name: str) -> int:
        """Return the number of rows whose prediction depends on a constant."""
        return int(np.count_nonzero(self.used[:, self.names.index(name)]))


def _stacked(parts: Sequence[Any]) -> dict[str, Array]:
    return {
        field.name: np.array([getattr(part, field.name) for part in parts])
        for field in fields(parts[0])
    }


class TimeProblem(_Problem):
    """The seconds of the steps of rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        works = [count_work(row.setup, rates_of(row.setup, row.device)) for row in rows]
        self.work = RankWork(**_stacked(works))  # type: ignore[arg-type]
        priors = PRIORS | {f"products: {row.device.chip}": chip_prior(row.device) for row in rows}
        factors = [factors_of(row.setup, row.device) for row in rows]
        super().__init__(rows, priors, factors, _SCALE)

    def published(self) -> Array:
        return np.array([row.step_s for row in self.rows])

    def _evaluate(self, coefficients: dict[str, Array]) -> Array:
        reached = Coefficients(**coefficients)  # type: ignore[arg-type]
        return np.asarray(step_time(self.work, reached).total_s)


class MemoryProblem(_Problem):
    """The bytes of ranks of rows."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.parts = AssumedMemory(**_stacked([memory_parts(row.setup) for row in rows]))  # type: ignore[arg-type]
        factors = [memory_factors(row.setup, row.memory_kind) for row in rows]
        super().__init__(rows, MEMORY_PRIORS, factors, _MEMORY_SCALE)
        matrix, _ = self.maps["reserved"]
        # Without an allocator's share, the factor is 1.
        self.maps["reserved"] = matrix, np.ones(len(rows))

    def published(self) -> Array:
        return np.array([row.memory_bytes for row in self.rows], dtype=float)

    def _evaluate(self, coefficients: dict[str, Array]) -> Array:
        factors = MemoryCoefficients(**coefficients)  # type: ignore[arg-type]
        return np.asarray(memory_bytes(self.parts, factors))


class CpuProblem(_Problem):
    """The seconds of the steps of CPU ranks, all of which were measured in the same way."""

    is_robust = False

    def __init__(self, rows: Sequence[CpuRow], priors: dict[str, Prior] | None = None) -> None:
        rates = [row.reached_rates for row in rows]
        works = [count_work(row.setup, each) for row, each in zip(rows, rates, strict=True)]
        self.rates = Rates(**_stacked(rates))  # type: ignore[arg-type]
        self.work = RankWork(**_stacked(works))  # type: ignore[arg-type]
        self.curve = ProductCurve(**_stacked([row.curve for row in rows]))  # type: ignore[arg-type]
        priors = priors or CPU_PRIORS | {"dequantize": PRIORS["dequantize"]}
        super().__init__(rows, priors, [cpu_factors()] * len(rows), _SCALE)

    def published(self) -> Array:
        return np.array([row.step_s for row in self.rows])

    def _evaluate(self, coefficients: dict[str, Array]) -> Array:
        return np.asarray(
            step_time(self.work, on_cpu(coefficients, self.curve, self.rates)).total_s
        )
