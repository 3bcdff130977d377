"""The section ``local_sgd`` of the schema: training with communication every so many steps."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Section


class LocalSgd(Section):
    """Settings of `mode: local_sgd` and `mode: diloco`."""

    steps: int = Field(
        20,
        ge=1,
        description="Steps H that each worker makes on its own between two synchronisations.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description=(
            "Groups of ranks that train on their own; the ranks of one share a gradient at each"
            " step, as `ddp` does. Default: one for each machine; on one machine, one for each"
            " rank."
        ),
    )
    warmup_steps: int = Field(
        0, ge=0, description="So many steps of plain `ddp` come first (post-local SGD)."
    )
    average_moments: bool = Field(
        False,
        description=(
            "`local_sgd`: average the optimizer's moments with the parameters, for more traffic."
        ),
    )
    outer_learning_rate: float = Field(
        0.7, gt=0, description="`diloco`: learning rate of the outer optimizer."
    )
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="`diloco`: its Nesterov momentum; 0 is plain SGD."
    )
    outer_dtype: Literal["float32", "bf16", "int8"] = Field(
        "float32",
        description="`diloco`: what the outer gradients are sent in; they are added up in float32.",
    )
    overlap_steps: int = Field(
        0,
        ge=0,
        description=(
            "What is averaged travels while so many more steps are made; 0: the workers wait"
            " for it."
        ),
    )
    overlap_mix: float = Field(
        0.5,
        ge=0,
        lt=1,
        description=(
            "`diloco` with overlap: the share of a worker's own parameters in the mixture with the"
            " outer ones when these arrive."
        ),
    )
    fragments: int = Field(
        1,
        ge=1,
        description=(
            "Parts of the parameters that are synchronised one at a time, spread evenly over the H"
            " steps."
        ),
    )
