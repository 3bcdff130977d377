"""`paceline explain memory`: parameters, gradients, optimizer state and activations, measured
through a step, without and with activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.core.files import human_bytes
from paceline.explain.catalog import ExplainOptions
from paceline.explain.record import Check, DrawnRow, Frame, Recording
from paceline.launch.fork_server import OPTIMIZER_MODULE
from paceline.launch.rank_pool import run_on_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from paceline.distributed.communicator import Communicator

PRELOAD = (
    "paceline.explain.training",
    "paceline.models.transforms.activation_checkpointing",
    OPTIMIZER_MODULE,
)
_BLOCKS, _WIDTH, _ROWS = 4, 256, 1024
_KINDS = ("parameters", "gradients", "optimizer", "activations")
_MODES = {"without checkpointing": "none", "with checkpointing": "full"}
_ABOUT = (
    "Training needs memory for parameters, gradients, optimizer state (AdamW: two numbers per"
    " parameter) and activations, which forward stores for backward. Activations grow with the"
    " batch, and are largest between forward and backward. With activation checkpointing, forward"
    " stores only the input of each block, and backward computes the rest again. Every tensor that"
    f" an operation allocates is counted until it is freed. Model: {_BLOCKS} blocks of two layers,"
    f" float32, batch of {_ROWS} rows."
)


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step.

    Args:
        moments: captions of the moments at which memory was measured.
        sizes: bytes by kind at each of them.
        peak_bytes: maximum of the total, also between the moments.
        gradients: first gradients, for comparison.
        parameters_bytes: bytes of the parameters, by their shapes.
    """

    moments: list[str]
    sizes: list[dict[str, int]]
    peak_bytes: int
    gradients: list[float]
    parameters_bytes: int


def record(options: ExplainOptions) -> Recording:
    """Measure a step of a small training in both modes, each in one process.

    The figures: ``modes`` (names), ``sizes`` (of each mode: bytes by kind at each frame) and
    ``peak_bytes`` (of each mode).
    """
    modes: list[StepMemory] = run_on_ranks(_measure_modes, 1)[0]
    plain, checkpointed = modes
    frames = tuple(
        Frame(
            moment,
            tuple(
                tuple(DrawnRow(kind, size_bytes=mode.sizes[number][kind]) for kind in _KINDS)
                for mode in modes
            ),
            is_key=number in _key_moments(modes),
        )
        for number, moment in enumerate(plain.moments)
    )
    after_step = [mode.sizes[-1] for mode in modes]
    return Recording(
        topic="memory",
        title="Memory of a training step, without and with activation checkpointing",
        about=_ABOUT,
        actors=tuple(_MODES),
        frames=frames,
        checks=(
            Check.equal(
                "parameters and gradients have the size of their shapes",
                [[mode.parameters_bytes] * 2 for mode in modes],
                [[sizes["parameters"], sizes["gradients"]] for sizes in after_step],
            ),
            Check(
                "the optimizer has two numbers per parameter",
                [2 * mode.parameters_bytes for mode in modes],
                [sizes["optimizer"] for sizes in after_step],
                # Each parameter also has a step count.
                all(
                    0 <= sizes["optimizer"] - 2 * mode.parameters_bytes < 1024
                    for sizes, mode in zip(after_step, modes, strict=True)
                ),
            ),
            Check.equal(
                "checkpointing does not change the gradients",
                plain.gradients,
                checkpointed.gradients,
            ),
            Check(
                "checkpointing lowers the peak",
                plain.peak_bytes,
                checkpointed.peak_bytes,
                checkpointed.peak_bytes < plain.peak_bytes,
            ),
        ),
        facts=(
            ("Peak without checkpointing", human_bytes(plain.peak_bytes)),
            ("Peak with checkpointing", human_bytes(checkpointed.peak_bytes)),
        ),
        figures={
            "modes": list(_MODES),
            "sizes": [mode.sizes for mode in modes],
            "peak_bytes": [mode.peak_bytes for mode in modes],
        },
    )


def _key_moments(modes: list[StepMemory]) -> set[int]:
    """Return the first, the last and the largest moment, and the end of backward."""
    activations = [sizes["activations"] for sizes in modes[0].sizes]
    last = len(activations) - 1
    return {0, activations.index(max(activations)), last - 1, last}


def _measure_modes(_: Communicator) -> list[StepMemory]:
    return [_measure(setting) for setting in _MODES.values()]


def _measure(setting: str) -> StepMemory:
    import torch
    from torch import nn

    from paceline.explain.allocations import LiveStorages
    from paceline.explain.training import build_adamw
    from paceline.models.transforms.activation_checkpointing import checkpoint_activations
    from paceline.parallel.optimizer_state import optimizer_tensors

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
            return result

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(_BLOCKS)))
    parameters = list(model.parameters())
    checkpoint_activations(model, setting)
    optimizer = build_adamw(list(model.named_parameters()))
    batch = torch.randn(_ROWS, _WIDTH)
    moments: list[str] = []
    sizes: list[dict[str, int]] = []
    live = LiveStorages()

    def measure(moment: str) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        known = {
            "parameters": _bytes(parameters),
            "gradients": live.bytes_of(gradients),
            "optimizer": live.bytes_of(optimizer_tensors(optimizer)),
        }
        others = live.total_bytes - known["gradients"] - known["optimizer"]
        moments.append(moment)
        sizes.append({**known, "activations": others})

    with live:
        measure("Before the first step: only the parameters are there.")
        x = batch
        for number, block in enumerate(model):
            x = block(x)
            measure(f"Forward of block {number + 1}: it stores activations for backward.")
        # Registered here, because forward hooks of checkpointed blocks also run in backward.
        for number, block in enumerate(model):
            first = next(block.parameters())
            text = f"Backward of block {number + 1}: gradients appear, and activations are freed."
            first.register_post_accumulate_grad_hook(lambda _, text=text: measure(text))
        loss = x.square().mean()
        del x
        loss.backward()
        del loss
        measure("After backward: all gradients are there, and no activations.")
        optimizer.step()
        measure("After the update: the optimizer has created its state in this first step.")
    gradient = parameters[0].grad
    assert gradient is not None
    values: list[float] = gradient.reshape(-1)[:4].tolist()
    size_bytes = _bytes(parameters)
    return StepMemory(moments, sizes, size_bytes + live.peak_bytes, values, size_bytes)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
