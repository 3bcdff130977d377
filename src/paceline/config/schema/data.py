"""The mapping form of a data source."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from paceline.config.schema.base import Names, Section, Text
from paceline.core.hub import modelscope_name
from paceline.core.texts import UserText

#: A weight of a source in a mixture.
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class DatasetSource(Section):
    """A data source with settings beyond its path or hub id."""

    path: Text = Field(
        description=(
            "File, folder or hub id; `path#N` takes the first N samples of a seeded shuffle, and"
            " `path#P%` a percentage of all samples."
        )
    )
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"] = Field(
        "auto", description="Row format; `auto` detects it from the columns."
    )
    split: Text = Field("train", description="Split of a hub dataset, a folder or a JSON file.")
    name: Text | None = Field(
        None, description="Configuration (subset) of a hub dataset or a folder."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Column names as `{expected: yours}`, e.g. `{prompt: question, completion:"
            " answer}`. An empty name disables reading the column."
        ),
    )
    ignore_columns: Names = Field(
        default_factory=list,
        description=(
            "Columns and message keys to ignore, in addition to the top-level `ignore_columns`."
        ),
    )
    roles: dict[str, Text | list[Text]] = Field(
        default_factory=dict,
        description=(
            "Additional names of chat roles as `{role: yours}`; roles are `system`,"
            " `user`, `assistant`, `tool` and `tool_call`."
        ),
    )
    weight: Weight | dict[Annotated[int, Field(ge=0)], Weight] = Field(
        1.0,
        description=(
            "With `mixing: weights`: how many rows are read from this source, relative to the"
            " weights of the others. Weights by step as `{0: 0.9, 1000: 0.5}` are linear between"
            " these steps and constant after the last."
        ),
    )

    @field_validator("weight")
    @classmethod
    def _has_steps(cls, value: float | dict[int, float]) -> float | dict[int, float]:
        if value == {}:
            raise ValueError(
                UserText(
                    "weights by step are empty: write e.g. {0: 0.9, 1000: 0.5}",
                    code="empty-weights-by-step",
                )
            )
        return value


Sources = Text | DatasetSource | list[Text | DatasetSource]


def modelscope_sources(sources: Sources) -> Sources:
    """Return the sources with ModelScope names instead of Hugging Face hub ids."""

    def convert(source: Text | DatasetSource) -> Text | DatasetSource:
        if isinstance(source, str):
            return modelscope_name(source)
        return source.model_copy(update={"path": modelscope_name(source.path)})

    return (
        [convert(source) for source in sources] if isinstance(sources, list) else convert(sources)
    )
