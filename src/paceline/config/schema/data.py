"""The data sources of the schema."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Names, Section, Text
from paceline.core.hub import modelscope_name


class DatasetSource(Section):
    """One source of samples, where a plain path or hub id does not say enough."""

    path: Text = Field(
        description=(
            "File, folder or hub id; `path#N` takes the first N samples of a seeded shuffle."
        )
    )
    format: Literal["auto", "alpaca", "messages", "sharegpt", "prompt_completion", "text"] = Field(
        "auto", description="Shape of a row; `auto` finds it from the columns."
    )
    split: Text = Field("train", description="Split of a hub dataset.")
    name: Text | None = Field(None, description="Configuration (subset) of a hub dataset.")
    columns: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Names of the columns where they are not the usual ones, as `{expected: yours}`; e.g."
            " `{prompt: question, completion: answer}`. An empty name means that the column is not"
            " read."
        ),
    )
    ignore_columns: Names = Field(
        default_factory=list,
        description="Columns (and keys of messages) to leave out, beside those of the top level.",
    )
    roles: dict[str, Text | list[Text]] = Field(
        default_factory=dict,
        description=(
            "More names of the roles in chats, as `{role: yours}`; roles are `system`, `user`,"
            " `assistant`, `tool` and `tool_call`."
        ),
    )


Sources = Text | DatasetSource | list[Text | DatasetSource]


def modelscope_sources(sources: Sources) -> Sources:
    def convert(source: Text | DatasetSource) -> Text | DatasetSource:
        if isinstance(source, str):
            return modelscope_name(source)
        return source.model_copy(update={"path": modelscope_name(source.path)})

    return (
        [convert(source) for source in sources] if isinstance(sources, list) else convert(sources)
    )
