"""The keys of the section ``grpo`` about what generates the completions, and how the loss corrects
for an engine that computes other probabilities than training."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from paceline.config.schema.base import CombinationError, Section, Text
from paceline.core.texts import UserText

Engine = Literal["generate", "continuous_batching", "vllm"]
CorrectionMode = Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


def _check_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", value):
        raise ValueError(
            UserText("give an address such as http://localhost:8000", code="not-a-url")
        )
    return value.rstrip("/")


class RolloutEngine(Section):
    """The keys of ``grpo`` about the engine. Those about vLLM and the correction are named as in
    TRL."""

    engine: Literal["auto", "generate", "continuous_batching", "vllm"] = Field(
        "auto",
        description=(
            "What generates the completions. `generate`: the forward pass of training with a cache,"
            " one prompt after the other. `continuous_batching`: transformers' engine for many"
            " requests. `vllm`: vLLM, which is untested. `auto` is `generate`."
        ),
    )
    importance_sampling_correction: bool | None = Field(
        None,
        description=(
            "Multiply the loss by the ratio of the probabilities in training to those with which"
            " the tokens were drawn. Default: with every engine except `generate`, which computes"
            " the same probabilities."
        ),
    )
    importance_sampling_mode: CorrectionMode | None = Field(
        None,
        description=(
            "Whether the ratio is one of each token or of a completion, and whether ratios outside"
            " of the limits are set to the limit (`truncate`) or to 0 (`mask`). Default:"
            " `token_truncate` for `grpo`, `sequence_truncate` for `rloo`."
        ),
    )
    importance_sampling_clip_max: float | None = Field(
        3.0, gt=0, description="Upper limit of the ratio; null for none."
    )
    importance_sampling_clip_min: float | None = Field(
        None, ge=0, description="Lower limit of the ratio. Default: none."
    )
    vllm_mode: Literal["colocate", "server"] = Field(
        "colocate",
        description=(
            "Whether each rank has a vLLM of its own on its GPU, or all ranks use a server that has"
            " been started with `vllm serve`."
        ),
    )
    vllm_server_base_url: Annotated[Text, AfterValidator(_check_url)] = Field(
        "http://localhost:8000", description="Address of the server."
    )
    vllm_server_timeout: float = Field(
        240.0, gt=0, description="Seconds to wait for the server at the start."
    )
    vllm_group_port: int = Field(
        51216,
        ge=1,
        le=65535,
        description="Port of rank 0 through which the server receives the weights.",
    )
    vllm_gpu_memory_utilization: float = Field(
        0.3, gt=0, lt=1, description="Share of the GPU's memory for a vLLM of the rank."
    )
    vllm_max_model_length: int | None = Field(
        None,
        ge=1,
        description=(
            "Longest prompt and completion together, in tokens, for a vLLM of the rank. Default:"
            " `train_args.max_length`."
        ),
    )
    vllm_enable_sleep_mode: bool = Field(
        False, description="Free the memory of the rank's vLLM between rollouts."
    )

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        lowest, highest = self.importance_sampling_clip_min, self.importance_sampling_clip_max
        if lowest is not None and highest is not None and lowest > highest:
            raise CombinationError(
                UserText(
                    "importance_sampling_clip_min: {lowest} is above importance_sampling_clip_max:"
                    " {highest}",
                    code="clip-limits-reversed",
                    lowest=lowest,
                    highest=highest,
                ),
                "grpo.importance_sampling_clip_min",
                "grpo.importance_sampling_clip_max",
            )
        return self

    @property
    def engine_used(self) -> Engine:
        """The engine of the config, or the one that ``auto`` stands for, which is tested and gives
        the same completions on any number of ranks."""
        return "generate" if self.engine == "auto" else self.engine

    @property
    def corrects_probabilities(self) -> bool:
        """Whether the loss is multiplied by ratios of probabilities."""
        if self.importance_sampling_correction is None:
            return self.engine_used != "generate"
        return self.importance_sampling_correction
