"""The section ``compression``: gradient compression for `ddp`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.schema.base import Auto, CombinationError, Section
from paceline.core.texts import UserText

#: The methods that may follow each sparse or low-rank method to reduce its precision.
CHAINS = {
    "topk": ("bf16", "fp16", "int8"),
    "randomk": ("bf16", "fp16", "int8"),
    "powersgd": ("bf16", "fp16"),
}
Method = Literal["none", "bf16", "fp16", "int8", "topk", "randomk", "powersgd", "signsgd"]


class Compression(Section):
    """Gradient compression for `ddp`: reduced precision, sparse, or low rank."""

    method: Method | list[Method] = Field(
        "none",
        description=(
            "`none`; `bf16`, `fp16`, `int8` (reduced precision); `topk`, `randomk`"
            " (sparse); `powersgd` (low rank); `signsgd` (majority vote of signs); or a"
            " chain such as `[topk, bf16]`."
        ),
    )
    ratio: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Fraction of gradient elements that `topk` and `randomk` send.",
    )
    rank: int = Field(
        4,
        ge=1,
        le=1024,
        description="Rank of the `powersgd` approximation.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description=(
            "Steps over which `topk` and `randomk` reduce the fraction geometrically from"
            " 1/4 to `ratio`."
        ),
    )
    local_moments: Auto | bool = Field(
        "auto",
        description=(
            "Apply Adam's update direction before compressing, with local second moments"
            " (`topk`, `randomk` with `adam` or `adamw`). `auto`: true."
        ),
    )
    momentum_correction: Auto | bool = Field(
        "auto",
        description=(
            "Accumulate momentum locally before elements are selected (`topk`, `randomk`"
            " with `sgd` and momentum). `auto`: true."
        ),
    )

    @model_validator(mode="after")
    def _check_chain(self) -> Compression:
        methods = self.method
        if isinstance(methods, str) or len(methods) == 1:
            return self
        text = f"[{', '.join(methods)}]"
        if len(methods) != 2 or methods[0] not in CHAINS:
            raise CombinationError(
                UserText(
                    "method {text} is not a valid chain; expected two methods, and one of {chains}"
                    " as the first method",
                    code="invalid-compression-chain",
                    text=text,
                    chains=", ".join(CHAINS),
                ),
                "compression.method",
            )
        if methods[1] not in CHAINS[methods[0]]:
            raise CombinationError(
                UserText(
                    "method {text} is not a valid chain; after {methods} expected one of {chains}",
                    code="invalid-second-compression",
                    text=text,
                    methods=methods[0],
                    chains=", ".join(CHAINS[methods[0]]),
                ),
                "compression.method",
            )
        return self

    @property
    def chain(self) -> tuple[str, ...]:
        """Return the methods in order; empty if gradients are not compressed."""
        methods = [self.method] if isinstance(self.method, str) else list(self.method)
        return () if methods == ["none"] else tuple(methods)

    @property
    def text(self) -> str:
        """Return the chain for display: ``topk``, ``topk + bf16``, ``none``."""
        return " + ".join(self.chain) or "none"
