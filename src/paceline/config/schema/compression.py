"""The section ``compression``: what is sent of the gradients, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from paceline.config.schema.base import Auto, Section

#: How each method may be followed by one that makes its numbers smaller.
CHAINS = {
    "topk": ("bf16", "fp16", "int8"),
    "randomk": ("bf16", "fp16", "int8"),
    "powersgd": ("bf16", "fp16"),
}
Method = Literal["none", "bf16", "fp16", "int8", "topk", "randomk", "powersgd", "signsgd"]


class Compression(Section):
    """What ddp sends of the gradients: fewer bits, fewer elements, or a matrix of low rank."""

    method: Method | list[Method] = Field(
        "none",
        description=(
            "`none`; `bf16`, `fp16`, `int8` (fewer bits an element); `topk`, `randomk` (few"
            " elements); `powersgd` (matrices of low rank); `signsgd` (signs, by majority vote); or"
            " a chain such as `[topk, bf16]`: what the first one chose, in fewer bits."
        ),
    )
    ratio: float = Field(
        0.01, gt=0, le=1, description="`topk`, `randomk`: share of the elements that is sent."
    )
    rank: int = Field(
        4,
        ge=1,
        le=1024,
        description="`powersgd`: rank of the matrices that stand for the gradient's.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description=(
            "`topk`, `randomk`: steps in which the share sent falls from 1/4 to `ratio`, by the"
            " same factor each step."
        ),
    )
    local_moments: Auto | bool = Field(
        "auto",
        description=(
            "`topk`, `randomk` with `adamw` or `adam`: each rank keeps Adam's second moment of its"
            " own gradient and sends the direction that follows from it; what waits to be sent"
            " stands for the first moment. `auto`: yes."
        ),
    )
    momentum_correction: Auto | bool = Field(
        "auto",
        description=(
            "`topk`, `randomk` with `sgd` and momentum: momentum is gathered on each rank, before"
            " elements are chosen. `auto`: yes."
        ),
    )

    @model_validator(mode="after")
    def _chain_makes_sense(self) -> Compression:
        given = self.method
        if isinstance(given, str):
            return self
        if len(given) == 1:
            return self
        text = f"[{', '.join(given)}]"
        if len(given) != 2 or given[0] not in CHAINS:
            raise ValueError(
                f"method {text} is no chain that makes sense; the first of two is one of"
                f" {', '.join(CHAINS)}"
            )
        if given[1] not in CHAINS[given[0]]:
            raise ValueError(
                f"method {text} is no chain that makes sense; after {given[0]}:"
                f" {', '.join(CHAINS[given[0]])}"
            )
        return self

    @property
    def chain(self) -> tuple[str, ...]:
        """The methods in order; empty where nothing is compressed."""
        given = [self.method] if isinstance(self.method, str) else list(self.method)
        return () if given == ["none"] else tuple(given)

    @property
    def text(self) -> str:
        """For a person: ``topk``, ``topk + bf16``."""
        return " + ".join(self.chain) or "none"


AllReduce = Annotated[
    Literal["native", "ring", "tree", "halving", "naive"],
    Field(
        description=(
            "How `ddp` sums gradients over the ranks: `native` by the backend, or by an algorithm"
            " of Paceline's own over point-to-point messages. The losses are the same to rounding."
        ),
    ),
]
