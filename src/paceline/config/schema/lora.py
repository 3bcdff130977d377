"""The section ``lora`` of the schema."""

import re

from pydantic import Field, field_validator

from paceline.config.schema.base import Section, Text, split_names

ALL_LINEAR = "all-linear"


def is_regex(text: str) -> bool:
    """Return whether text has a sign that a name of modules does not have."""
    return re.search(r"[\\()\[\]|*+?^${}]", text) is not None


class Lora(Section):
    """Low-rank adaptation (Hu et al., 2021), through peft."""

    enable: bool = Field(
        False, description="Train low-rank adapters and leave the model's own weights frozen."
    )
    rank: int = Field(8, ge=1, description="Rank r of the update.")
    alpha: float = Field(32.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Text | list[Text] = Field(
        "all-linear",
        description=(
            "Modules that get an adapter: a list of names, a regular expression that matches whole"
            " names, or `all-linear` (all linear layers but the output head)."
        ),
    )
    modules_to_save: list[Text] = Field(
        default_factory=list,
        description="Modules trained in full beside the adapters, e.g. `[lm_head]`.",
    )
    adapter: Text | None = Field(
        None, description="Folder of an adapter to go on from, instead of a fresh one."
    )

    @field_validator("target_modules", mode="after")
    @classmethod
    def _names_as_a_list(cls, value: str | list[str]) -> str | list[str]:
        """Text without the signs of a regular expression is one name, or several with commas."""
        if isinstance(value, list) or value == ALL_LINEAR or is_regex(value):
            return value
        return split_names(value) or value
