"""Merge the adapters of a run into the weights of its base model, and compare the result."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.core.errors import RunError
from paceline.models.adapters.targets import adapter_layers

#: Number of tokens whose logits are compared.
_NUM_TOKENS = 16
_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id")
#: Largest difference that rounding explains, relative to the largest logit: a merged weight is
#: rounded once more than the adapted model's, in 16 bits to 8 or 11 significant bits.
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}


@dataclass(frozen=True)
class LogitComparison:
    """How the logits of a merged model differ from the logits of the model with its adapters.

    Args:
        max_difference: largest absolute difference.
        max_logit: largest absolute logit of the model with its adapters.
        dtype: dtype of the weights.
    """

    max_difference: float
    max_logit: float
    dtype: torch.dtype

    @property
    def is_close(self) -> bool:
        """Whether the rounding of the weights explains the difference."""
        limit = _TOLERANCES.get(self.dtype, _TOLERANCES[torch.bfloat16])
        return self.max_difference <= limit * max(self.max_logit, 1.0)

    def text(self) -> str:
        return (
            f"logits of the merged model differ by at most {self.max_difference:.2g} from the"
            f" logits with the adapters (largest logit: {self.max_logit:.3g})"
        )


def merge_adapters(adapted: Any) -> Any:
    """Return the base model with its adapters merged into its weights.

    An embedding and a head that share a weight no longer do if the adapters change only one of
    them, and the config of the model says so: otherwise the other would change with it.
    """
    untie_adapted(adapted)
    model = adapted.merge_and_unload()
    embeddings, head = model.get_input_embeddings(), _head(model)
    if head is not None and head.weight is not embeddings.weight:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    return model


def untie_adapted(adapted: nn.Module) -> None:
    """Give each layer with an adapter a weight of its own."""
    uses: dict[int, int] = {}
    for _, parameter in adapted.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for _, layer in adapter_layers(adapted):
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if isinstance(weight, nn.Parameter) and uses.get(id(weight), 0) > 1:
            uses[id(weight)] -= 1
            base.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


@torch.no_grad()
def some_logits(model: Any) -> torch.Tensor:
    """Return the logits of a model for tokens from all over its vocabulary, in float32."""
    num_tokens = int(model.get_input_embeddings().weight.shape[0])
    ids = torch.linspace(1, num_tokens - 1, _NUM_TOKENS).long().unsqueeze(0)
    for name in _PLACEHOLDERS:  # stands for an image, which is not among the inputs
        ids[ids == getattr(model.config, name, None)] = 1
    logits: torch.Tensor = model.eval()(input_ids=ids.to(model.device)).logits
    return logits.float()


def compare_logits(expected: torch.Tensor, merged: Any) -> LogitComparison:
    """Compare the logits of a merged model to the logits of the model with its adapters.

    Raises:
        RunError: they differ by more than the rounding of the weights explains.
    """
    dtype = next(merged.parameters()).dtype
    difference = (some_logits(merged) - expected).abs().max()
    result = LogitComparison(float(difference), float(expected.abs().max()), dtype)
    if not result.is_close:
        raise RunError(
            "the merged model is not equal to the model with its adapters: {result}",
            code="merge-not-equal",
            fix="use the adapters without a merge, and report this with the config of the run",
            result=result.text(),
        )
    return result


def load_merged(auto_class: Any, folder: Path) -> Any:
    """Return the model that was written to ``folder``, as a user loads it."""
    return auto_class.from_pretrained(str(folder), dtype="auto")
