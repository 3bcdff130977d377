"""The section ``lora`` of the schema."""

import re
from typing import Literal

from pydantic import Field, field_validator

from paceline.config.schema.base import Section, Text, split_names
from paceline.core.texts import UserText

ALL_LINEAR = "all-linear"
DEFAULT_INIT = "default"
#: Initializations that take the adapter out of the frozen weights: weight = rest + update.
_SUBTRACTED = re.compile(r"olora|pissa(_niter_[1-9]\d*)?")
#: Initialization that approximates the rounding error of quantized weights.
LOFTQ = "loftq"
_INITS = (DEFAULT_INIT, "gaussian", "orthogonal", "pissa", "pissa_niter_16", "olora", LOFTQ)
#: Initializations of peft that need batches of the training data before the start.
_DATA_INITS = ("eva", "corda", "lora_ga")


def is_regex(text: str) -> bool:
    """Return whether text has a character that module names do not have."""
    return re.search(r"[\\()\[\]|*+?^${}]", text) is not None


class Lora(Section):
    """Low-rank adaptation (Hu et al., 2021) and its variants, through peft."""

    enable: bool = Field(
        False, description="Train low-rank adapters and freeze the model's own weights."
    )
    method: Literal["lora", "vera"] = Field(
        "lora",
        description=(
            "`lora`, or `vera` (Kopiczko et al., 2023): random matrices that all layers share, and"
            " two trained vectors per layer. VeRA needs a higher rank, e.g. 256, and learning rate."
        ),
    )
    rank: int = Field(8, ge=1, description="Rank r of the update.")
    alpha: float = Field(
        32.0,
        gt=0,
        description="Scaling factor: the update is multiplied by alpha / rank. Not with VeRA.",
    )
    use_rslora: bool = Field(
        False,
        description=(
            "Multiply the update by alpha / √rank (Kalajdzievski, 2023), so that a high rank learns"
            " as fast as a low one."
        ),
    )
    use_dora: bool = Field(
        False,
        description=(
            "Train the magnitude of each output separately from its direction (Liu et al., 2024)."
        ),
    )
    init_lora_weights: Text = Field(
        DEFAULT_INIT,
        description=(
            "Initialization of the adapters, as in peft: `default`, `gaussian`, `orthogonal`,"
            " `pissa` (Meng et al., 2024), `pissa_niter_16` (the same with an approximate, much"
            " faster decomposition), `olora` (Büyükakyüz, 2024), or `loftq` (Li et al., 2023)."
            " `pissa` and `olora` take the adapter out of the frozen weights; the adapter is saved"
            " as the difference from the original weights, with twice the rank. `loftq` starts"
            " from the rounding error of the weights, and requires `lora.quantize`."
        ),
    )
    loraplus_lr_ratio: float | None = Field(
        None,
        gt=0,
        description=(
            "LoRA+ (Hayou et al., 2024): the learning rate of the matrices B is multiplied by this,"
            " e.g. 16."
        ),
    )
    quantize: Literal["none", "nf4", "fp4", "int8"] = Field(
        "none",
        description=(
            "QLoRA (Dettmers et al., 2023): keep the frozen weights of linear layers in 4 or 8"
            " bits, through bitsandbytes. Output head and embeddings stay in 16 bits. int8 only"
            " with `single`, `ddp` and `zero1`."
        ),
    )
    double_quant: bool = Field(
        True, description="Quantize the scales of 4-bit weights too, to 8 bits."
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

    @field_validator("init_lora_weights", mode="before")
    @classmethod
    def _true_is_default(cls, value: object) -> object:
        return DEFAULT_INIT if value is True or value == "true" else value

    @field_validator("init_lora_weights", mode="after")
    @classmethod
    def _check_init(cls, value: str) -> str:
        value = value.lower().replace("-", "_")
        if value in _DATA_INITS:
            raise ValueError(
                UserText(
                    "{value} decomposes activations or gradients of the training data, which are"
                    " not known when the model is built; use one of {inits}",
                    code="unsupported-lora-initialization",
                    value=value,
                    inits=", ".join(_INITS),
                )
            )
        if value not in _INITS and _SUBTRACTED.fullmatch(value) is None:
            raise ValueError(
                UserText(
                    "unknown initialization; use one of {inits}",
                    code="unknown-lora-initialization",
                    inits=", ".join(_INITS),
                )
            )
        return value

    @property
    def subtracts_adapter(self) -> bool:
        """Whether the initial adapter is subtracted from the frozen weights."""
        return self.adapter is None and _SUBTRACTED.fullmatch(self.init_lora_weights) is not None

    @property
    def corrects_rounding(self) -> bool:
        """Whether new adapters start from the rounding error of the quantized weights."""
        return self.adapter is None and self.init_lora_weights == LOFTQ

    @field_validator("target_modules", mode="after")
    @classmethod
    def _split_names(cls, value: str | list[str]) -> str | list[str]:
        """Split comma-separated names, but not a regular expression."""
        if isinstance(value, list) or value == ALL_LINEAR or is_regex(value):
            return value
        return split_names(value) or value
