"""The section ``evaluation`` of the schema."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Section


class Evaluation(Section):
    """How the validation data is run."""

    where: Literal["all", "rank0"] = Field(
        "all",
        description=(
            "`all`: every rank takes a share, exact to the last row. `rank0`: one does all, for"
            " comparison."
        ),
    )
    samples: int = Field(
        3,
        ge=0,
        le=100,
        description=(
            "With `sft` and `pretrain`: answers that the model gives to so many held-out prompts at"
            " each evaluation, kept in the run's events beside the references. They change nothing"
            " of the training. 0: none."
        ),
    )
    max_new_tokens: int = Field(64, ge=1, description="Most tokens of such an answer.")
