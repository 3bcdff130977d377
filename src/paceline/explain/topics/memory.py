"""`paceline explain memory`: parameters, gradients, optimizer state and activations, measured
through a step, without and with activation checkpointing."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.core.files import human_bytes
from paceline.explain.allocations import LiveStorages
from paceline.explain.rank_topic import RankTopic, numbers_of
from paceline.explain.record import Check, DrawnRow, Frame
from paceline.explain.training import build_adamw
from paceline.messages.pages import PageText
from paceline.models.transforms.activation_checkpointing import checkpoint_activations
from paceline.parallel.optimizer_state import optimizer_tensors

_BLOCKS, _WIDTH, _ROWS = 4, 256, 1024
_KINDS = ("parameters", "gradients", "optimizer", "activations")
_MODES = {"without checkpointing": "none", "with checkpointing": "full"}
_ABOUT = PageText(
    "Training needs memory for parameters, gradients, optimizer state (AdamW: two numbers per"
    " parameter) and activations, which forward stores for backward. Activations grow with the"
    " batch, and are largest between forward and backward. With activation checkpointing, forward"
    " stores only the input of each block, and backward computes the rest again. Every tensor"
    " that an operation allocates is counted until it is freed. Model: {blocks} blocks of two"
    " layers, float32, batch of {rows} rows.",
    blocks=_BLOCKS,
    rows=_ROWS,
)


@dataclass
class StepMemory:
    """The memory of a step.

    Args:
        parameters_bytes: bytes of the parameters, by their shapes.
        moments: captions of the moments at which memory was measured.
        sizes: bytes by kind at each of them.
        peak_bytes: maximum of the total, also between the moments.
        gradients: first gradients, for comparison.
    """

    parameters_bytes: int
    moments: list[str] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    peak_bytes: int = 0
    gradients: list[float] = field(default_factory=list)


class MemoryTopic(RankTopic):
    """Measure a step of a small training in both modes, in one process.

    The figures: ``modes`` (names), ``sizes`` (of each mode: bytes by kind at each frame) and
    ``peak_bytes`` (of each mode).
    """

    title = "Memory of a training step, without and with activation checkpointing"
    about = _ABOUT

    def run(self) -> None:
        self.modes = [_measure(setting) for setting in _MODES.values()]
        self.actors = [*_MODES]

    def frames(self) -> Iterable[Frame]:
        moments = self.modes[0].moments
        return tuple(
            Frame(
                moment,
                tuple(
                    tuple(DrawnRow(kind, size_bytes=mode.sizes[number][kind]) for kind in _KINDS)
                    for mode in self.modes
                ),
                is_key=number in self._key_moments(),
            )
            for number, moment in enumerate(moments)
        )

    def _key_moments(self) -> set[int]:
        """Return the first, the last and the largest moment, and the end of backward."""
        activations = [sizes["activations"] for sizes in self.modes[0].sizes]
        last = len(activations) - 1
        return {0, activations.index(max(activations)), last - 1, last}

    def check_frames(self, frames: Sequence[Frame]) -> list[Check]:
        plain, checkpointed = self.modes
        after_step = [mode.sizes[-1] for mode in self.modes]
        parameters = [mode.parameters_bytes for mode in self.modes]
        optimizer = [sizes["optimizer"] for sizes in after_step]
        return [
            Check.equal(
                "parameters and gradients have the size of their shapes",
                [[size_bytes] * 2 for size_bytes in parameters],
                [[sizes["parameters"], sizes["gradients"]] for sizes in after_step],
            ),
            Check(
                "the optimizer has two numbers per parameter",
                [2 * size_bytes for size_bytes in parameters],
                optimizer,
                # Each parameter also has a step count.
                all(
                    0 <= measured - 2 * size_bytes < 1024
                    for measured, size_bytes in zip(optimizer, parameters, strict=True)
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
        ]

    def facts(self) -> dict[str, str]:
        pairs = zip(_MODES, self.modes, strict=True)
        return {
            PageText("Peak {name}", name=name): human_bytes(mode.peak_bytes) for name, mode in pairs
        }

    def add_figures(self) -> None:
        self.figures = {
            "modes": list(_MODES),
            "sizes": [mode.sizes for mode in self.modes],
            "peak_bytes": [mode.peak_bytes for mode in self.modes],
        }


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(nn.functional.gelu(self.up(x)))
        return result


def _measure(setting: str) -> StepMemory:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(_BLOCKS)))
    parameters = list(model.parameters())
    checkpoint_activations(model, setting)
    optimizer = build_adamw(list(model.named_parameters()))
    batch = torch.randn(_ROWS, _WIDTH)
    live, memory = LiveStorages(), StepMemory(_bytes(parameters))

    def measure(moment: str) -> None:
        gradients = live.bytes_of(each.grad for each in parameters if each.grad is not None)
        state = live.bytes_of(optimizer_tensors(optimizer))
        sizes = (memory.parameters_bytes, gradients, state, live.total_bytes - gradients - state)
        memory.moments.append(moment)
        memory.sizes.append(dict(zip(_KINDS, sizes, strict=True)))

    with live:
        measure("Before the first step: only the parameters are there.")
        x = batch
        for number, block in enumerate(model):
            x = block(x)
            measure(
                PageText(
                    "Forward of block {number}: it stores activations for backward.",
                    number=number + 1,
                )
            )
        # Registered here, because forward hooks of checkpointed blocks also run in backward.
        for number, block in enumerate(model):
            first = next(block.parameters())
            text = PageText(
                "Backward of block {number}: gradients appear, and activations are freed.",
                number=number + 1,
            )
            first.register_post_accumulate_grad_hook(lambda _, text=text: measure(text))
        loss = x.square().mean()
        del x
        loss.backward()
        del loss
        measure("After backward: all gradients are there, and no activations.")
        optimizer.step()
        measure("After the update: the optimizer has created its state in this first step.")
    memory.gradients = numbers_of(parameters[0].grad)[:4]
    memory.peak_bytes = memory.parameters_bytes + live.peak_bytes
    return memory


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
