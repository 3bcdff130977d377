"""The sections of the built-in tasks other than language modeling: ``classify``, ``recommend``."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.schema.base import Section, Text


class Classify(Section):
    """Settings of `task: classify`."""

    image_size: int = Field(
        32, ge=4, description="Images of a folder are resized to this height and width, in pixels."
    )
    hidden: int = Field(64, ge=4, description="Width of the built-in image models.")
    augment: bool = Field(
        False, description="Random shifts and flips of training images, fixed by the seed."
    )


Size = Annotated[int, Field(ge=1)]


class Recommend(Section):
    """Settings of `task: recommend`."""

    label: Text = Field("label", description="Column with the click: 0 or 1.")
    dense: list[Text] = Field(
        default_factory=list,
        description=(
            "Columns of numbers; each is brought to mean 0 and variance 1. Empty cells are 0."
        ),
    )
    categorical: list[Text] = Field(
        default_factory=list, description="Columns of ids, one embedding table each."
    )
    separator: Text | None = Field(
        None,
        description=(
            "Splits a cell of ids into a bag of them, whose vectors are added up, e.g. `|`."
            " Default: one id a cell."
        ),
    )
    ids: Literal["hash", "vocabulary", "given"] = Field(
        "hash",
        description=(
            "How a value becomes a row of its table: by its hash; by its place among the training"
            " data's values (unknown ones share row 0); or the value is the row's number itself."
        ),
    )
    table_size: Size | dict[str, Size] | None = Field(
        None,
        description=(
            "Rows of the tables, one number or `{column: rows}`. Default: 100,000 with `hash`, else"
            " as many as the training data need."
        ),
    )
    min_count: int = Field(
        1, ge=1, description="With `vocabulary`: values seen less often share row 0."
    )
    embedding_dim: int = Field(16, ge=1, description="Length of a row.")
    bottom: list[Size] = Field(
        default_factory=lambda: [64],
        description=(
            "Widths of the hidden layers over the dense columns; the last layer has"
            " `embedding_dim`."
        ),
    )
    top: list[Size] = Field(
        default_factory=lambda: [64, 32],
        description="Widths of the hidden layers over the interactions.",
    )
