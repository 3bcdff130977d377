"""The section ``vision``: models that read texts and images."""

from pydantic import Field

from paceline.config.schema.base import Section, Text


class Vision(Section):
    """Settings of vision-language models with `task: sft`."""

    text_only: bool = Field(
        False,
        description=(
            "Train a model of a type that can be both (such as Gemma 3 or Qwen3.5) as a causal"
            " language model, on rows without images."
        ),
    )
    freeze_vision_tower: bool = Field(
        True, description="Keep the vision tower's weights; with LoRA, add no adapters to it."
    )
    freeze_multi_modal_projector: bool = Field(
        True,
        description=(
            "Keep the weights of the projector between the vision tower and the language model;"
            " with LoRA, add no adapters to it."
        ),
    )
    freeze_language_model: bool = Field(
        False,
        description="Keep the language model's weights; with LoRA, add no adapters to it.",
    )
    max_images: int | None = Field(
        None, ge=1, description="Rows with more images are dropped and counted. Default: no limit."
    )
    max_pixels: int | None = Field(
        None,
        ge=1,
        description=(
            "Images with more pixels are scaled down before they are processed. Default: no limit."
        ),
    )
    images_folder: Text | None = Field(
        None, description="Folder of relative image paths. Default: the folder of the data file."
    )
