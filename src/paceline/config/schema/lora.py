"""The section ``lora`` of the schema."""

import re

from pydantic import Field, field_validator

from paceline.config.schema.base import Section, Text, split_names

ALL_LINEAR = "all-linear"


def is_regex(text: str) -> bool:
    """Return whether text has a character that module names do not have."""
    return re.search(r"[\\()\[\]|*+?^${}]", text) is not None


class Lora(Section):
    """Low-rank adaptation (Hu et al., 2021), through peft."""

    enable: bool = Field(
        False, description="Train low-rank adapters and freeze the model's own weights."
    )
    rank: int = Field(8, ge=1, description="Rank r of the update.")
    alpha: float = Field(
        32.0, gt=0, description="Scaling factor: the update is multiplied by alpha / rank."
    )
    dropout: float = Field(0.05, ge=0, lt=1, description="Dropout on the adapter's input.")
    target_modules: Text | list[Text] = Field(
        "all-linear",
        description=(
            "Modules to adapt: a list of names, a regular expression that matches full"
            " names, or `all-linear` (all linear layers except the output head)."
        ),
    )
    modules_to_save: list[Text] = Field(
        default_factory=list,
        description="Modules trained in full in addition to the adapters, e.g. `[lm_head]`.",
    )
    adapter: Text | None = Field(
        None, description="Folder of an existing adapter to continue training."
    )

    @field_validator("target_modules", mode="after")
    @classmethod
    def _split_names(cls, value: str | list[str]) -> str | list[str]:
        """Split comma-separated names, but not a regular expression."""
        if isinstance(value, list) or value == ALL_LINEAR or is_regex(value):
            return value
        return split_names(value) or value
