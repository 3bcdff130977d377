"""The fitted constants of the planner, and which of them the time of a set-up depends on.

Imports no torch.

``devices.json`` has them with their priors, the sources of these, and the number of published
results that each was fitted to. ``benchmarks/planner_accuracy.py --refit`` writes them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any, TypedDict, TypeVar

from paceline.planner.devices import Device
from paceline.planner.machine.profile import ProductCurve
from paceline.planner.setup import TrainingSetup
from paceline.planner.time.rates import Rates
from paceline.planner.time.step import Coefficients

T = TypeVar("T")
#: Coefficient → the constants that it is the product of. Empty: it is 0.
Factors = dict[str, tuple[str, ...]]


@cache
def constants() -> dict[str, float]:
    """Return the constants by name."""
    return {name: float(entry["value"]) for name, entry in _table()["constants"].items()}


def spread_of(device: Device) -> float:
    """Return by which factor (as its logarithm) a time may differ either way, so that 80 % of the
    published results are within it: results of a left-out project, on a chip that other projects
    also used, or on one that they did not."""
    entry = _table()["constants"].get(f"products: {device.chip}")
    is_fitted = entry is not None and bool(entry.get("rows"))
    return _table()["spread"]["fitted chip" if is_fitted else "other chip"]


class _ConstantRow(TypedDict):
    """A fitted constant; ``rows`` is the number of results that depend on it."""

    value: float
    prior: float
    width: float
    rows: int
    source: str


class _Table(TypedDict):
    constants: dict[str, _ConstantRow]
    spread: dict[str, float]


@cache
def _table() -> _Table:
    text = (files("paceline.planner") / "devices.json").read_text(encoding="utf-8")
    content: _Table = json.loads(text)
    return content


def factors_of(setup: TrainingSetup, device: Device) -> Factors:
    """Return which constants a set-up depends on."""
    products = ("products", f"products: {device.chip}")
    is_float8 = setup.precision == "fp8"
    low_products = (*products, "products: fp8") if is_float8 else products
    loss = ("loss: fp8",) if is_float8 else ()
    native = setup.software == "native"
    attention = [f"attention: {device.generation}"]
    if setup.dims.queries // max(1, setup.dims.heads) < 128:
        attention.append("attention: narrow heads")
    if setup.attention == "flash-1":
        attention.append("attention: flash-1")
    stream = [f"stream: {setup.software}"]
    if is_float8 and setup.fp8_scaling != "fused":
        stream.append(f"stream: fp8 by {setup.fp8_scaling}")
    dequantize = ["dequantize"]
    if setup.software == "eager-2023":
        dequantize.append("dequantize: 2023")
    launch = [] if native else [f"launch: {setup.software}"]
    if launch and setup.zero_stage == 3:
        launch.append("launch: sharded")
    if launch and setup.is_frozen:
        launch.append("launch: adapters")
    link = "link: NVLink" if device.has_fast_link else "link: PCIe"
    return {
        "product_share": low_products,
        "head_share": products,
        "attention_share": tuple(attention),
        "row_loss": ("loss: rows", *loss),
        "width_loss": ("loss: widths", *loss),
        "head_row_loss": ("loss: rows",),
        "head_width_loss": ("loss: widths",),
        "stream": tuple(stream),
        "logits": ("logits",) if setup.cross_entropy == "plain" else ("logits", "logits: fused"),
        "dequantize": tuple(dequantize),
        "optimizer": ("optimizer",),
        "launch_s": tuple(launch),
        "link_share": (link,),
        "tensor_link_share": (link, "link: tensor"),
        "network_share": ("network",),
        "network_decay": ("network: decay",),
        "tensor_message_s": ("latency: tensor",),
        "shard_message_s": ("latency: shards",),
        "sync_message_s": (),  # part of the next
        "sync_rank_s": ("latency: gradients",),
        "tensor_exposed": ("tensor: async",) if setup.async_tensor else ("tensor: exposed",),
        "overlap": ("overlap: shards",),
        "overlap_cost": ("overlap: cost",),
        "sync_overlap": ("overlap: gradients",),
        "sync_overlap_cost": ("overlap: cost",),
        "gather_exposed": ("gather: exposed",),
        "hop": ("pipeline: hop",),
        "bubble": ("pipeline: bubble",),
        "host_copy": ("host copy",),
        "overhead_s": ("overhead",),
    }


def cpu_factors() -> Factors:
    """Return which constants a CPU rank depends on, beside what was measured there."""
    products, messages = ("cpu: products",), ("cpu: messages",)
    return {
        "product_share": products,
        "head_share": products,
        "attention_share": ("cpu: attention",),
        "stream": ("cpu: stream",),
        "logits": ("cpu: logits",),
        "dequantize": ("dequantize",),
        "optimizer": ("cpu: optimizer",),
        "launch_s": ("cpu: operations",),
        "link_copies": ("cpu: copies",),
        "tensor_message_s": messages,
        "shard_message_s": (*messages, "cpu: sharded"),
        "sync_message_s": messages,
        "sync_overlap_cost": ("cpu: overlap",),
        "bubble": ("cpu: bubble",),
        "overhead_s": ("cpu: overhead",),
    }


def on_cpu(fitted: Mapping[str, T], curve: ProductCurve, rates: Rates) -> Coefficients:
    """Return the coefficients of a CPU rank from the fitted ones and its measured products. Python
    and the threads that send run on the same cores, so that little hides their time. Two thirds of
    a step are backward, which the gradients of data parallelism overlap with. Values may be
    arrays.

    A message takes its time on the link, as measured without computation beside it, and time for
    reads and writes in memory, which compete with the computation. A slow link therefore reaches
    almost all of its measured rate, and a fast one only a part.
    """
    nothing = ("network_decay", "sync_rank_s", "overlap", "overlap_cost")
    fixed: dict[str, float] = dict.fromkeys(nothing, 0.0)
    fixed |= dict.fromkeys(("tensor_exposed", "gather_exposed", "hop", "host_copy"), 1.0)
    fixed |= {"sync_overlap": 2 / 3}
    fixed |= dict.fromkeys(("row_loss", "head_row_loss"), curve.row_loss)
    fixed |= dict.fromkeys(("width_loss", "head_width_loss"), curve.width_loss)
    copies: Any = fitted["link_copies"]
    share = 1 / (1 + copies * rates.link_bytes_s / rates.memory_bytes_s)
    fixed |= dict.fromkeys(("link_share", "tensor_link_share", "network_share"), share)
    others = {name: value for name, value in fitted.items() if name != "link_copies"}
    return Coefficients(**fixed, **others, launch_order=1.0)  # type: ignore[arg-type]


def cpu_coefficients(
    curve: ProductCurve, rates: Rates, constants: Mapping[str, float]
) -> Coefficients:
    """Return what a CPU rank reaches of its measured rates."""
    return on_cpu(
        {
            name: math.prod(constants[factor] for factor in used)
            for name, used in cpu_factors().items()
        },
        curve,
        rates,
    )


def with_measured_products(
    reached: Coefficients,
    curve: ProductCurve,
    operation_s: float,
    setup: TrainingSetup,
    constants: Mapping[str, float],
) -> Coefficients:
    """Return the coefficients of an accelerator whose products and launches were measured: a step
    reaches a share of the measured products, and a layer launches as many operations as were
    counted on CPU ranks."""
    share = constants["products"]
    low = share * (constants["products: fp8"] if setup.precision == "fp8" else 1)
    launch_s = reached.launch_s / constants["launch: eager"]
    return replace(
        reached,
        product_share=low,
        head_share=share,
        row_loss=curve.row_loss,
        head_row_loss=curve.row_loss,
        width_loss=curve.width_loss,
        head_width_loss=curve.width_loss,
        launch_s=launch_s * constants["cpu: operations"] * operation_s,
    )


def coefficients_of(
    setup: TrainingSetup, device: Device, constants: Mapping[str, float]
) -> Coefficients:
    """Return what the set-up reaches on the device."""
    values = {}
    for name, used in factors_of(setup, device).items():
        values[name] = math.prod(_value(factor, device, constants) for factor in used)
        if not used:
            values[name] = 0.0
    return Coefficients(**values)


def _value(name: str, device: Device, constants: Mapping[str, float]) -> float:
    """Return a constant; for a chip without published results, the constant of its family."""
    if name in constants:
        return constants[name]
    assert name == f"products: {device.chip}", name
    return constants[f"products: {device.family}"]
