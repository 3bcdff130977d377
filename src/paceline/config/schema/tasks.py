"""The sections of the built-in tasks other than language modeling: ``classify``, ``recommend``."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.schema.base import Names, Section, Text

#: Tasks that train a causal language model on texts.
LANGUAGE_TASKS = ("sft", "pretrain")
#: Tasks that train one on answers that are marked as preferred or not.
PREFERENCE_TASKS = ("dpo", "orpo", "kto", "simpo")
#: Tasks that train on answers that are marked as preferred or not, with any kind of model.
ANSWER_TASKS = (*PREFERENCE_TASKS, "reward")
#: Tasks that train one on completions that it generates, with rewards for them.
ROLLOUT_TASKS = ("grpo", "rloo")
#: All tasks that train a causal language model.
CAUSAL_TASKS = (*LANGUAGE_TASKS, *PREFERENCE_TASKS, *ROLLOUT_TASKS)
#: All built-in tasks.
TASKS = (*CAUSAL_TASKS, "reward", "classify", "recommend")


class Classify(Section):
    """Settings of `task: classify`."""

    image_size: int = Field(
        32, ge=4, description="Height and width in pixels to which images are resized."
    )
    hidden_size: int = Field(64, ge=4, description="Width of the built-in image models.")
    augment: bool = Field(
        False,
        description=(
            "Apply random shifts and flips to training images (reproducible from the seed)."
        ),
    )
    labels: Names = Field(
        default_factory=list,
        description=(
            "Names of the classes of texts, in the order of their numbers. Default: the names in"
            " the model if the data's labels are among them, else the labels of the data."
        ),
    )


Size = Annotated[int, Field(ge=1)]


class Recommend(Section):
    """Settings of `task: recommend`."""

    label: Text = Field("label", description="Click column with values 0 and 1.")
    dense_features: list[Text] = Field(
        default_factory=list,
        description=(
            "Numeric columns, each standardized to mean 0 and variance 1. Empty cells are 0."
        ),
    )
    sparse_features: list[Text] = Field(
        default_factory=list, description="Id columns, with one embedding table each."
    )
    separator: Text | None = Field(
        None,
        description=(
            "Separator of several ids in one cell, e.g. `|`; their embeddings are summed."
            " Default: one id per cell."
        ),
    )
    id_mapping: Literal["hash", "vocabulary", "identity"] = Field(
        "hash",
        description=(
            "Mapping from a value to a table row: `hash`; `vocabulary` (index among the"
            " values of the training data; unknown values share row 0); `identity` (the value"
            " is the row number)."
        ),
    )
    table_size: Size | dict[str, Size] | None = Field(
        None,
        description=(
            "Rows of each table, one number or `{column: rows}`. Default: 100,000 with"
            " `hash`, else as many as the training data requires."
        ),
    )
    min_count: int = Field(
        1, ge=1, description="`vocabulary`: values that occur less often than this share row 0."
    )
    embedding_dim: int = Field(16, ge=1, description="Embedding dimension.")
    bottom_mlp: list[Size] = Field(
        default_factory=lambda: [64],
        description=(
            "Hidden layer widths of the MLP over the dense columns; its output has `embedding_dim`."
        ),
    )
    top_mlp: list[Size] = Field(
        default_factory=lambda: [64, 32],
        description="Hidden layer widths of the MLP over the interactions.",
    )
