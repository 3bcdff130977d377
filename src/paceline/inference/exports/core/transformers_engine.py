"""Run a model with transformers for a proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.inference.device import inference_device
from paceline.inference.exports.core.forms import ProofPrompt
from paceline.inference.exports.core.prompts import rendered
from paceline.models.blocks import base_model


class TransformersProofEngine:
    """Runs a model of transformers.

    Args:
        model: language model, vision-language model or text classifier.
        tokenizer: its tokenizer.
    """

    is_normalized = False

    def __init__(self, model: Any, tokenizer: Any) -> None:
        import transformers

        self.name = f"transformers {transformers.__version__}"
        self.model = model.to(inference_device()).eval()
        self.tokenizer = tokenizer

    @classmethod
    def load(
        cls, folder: Path, trusts_code: bool = False, dtype: str = "auto"
    ) -> TransformersProofEngine:
        """Load the model in a folder, as its users do.

        Args:
            trusts_code: whether code in the folder may run.
            dtype: dtype in which the model computes; auto: the dtype of its weights.
        """
        import transformers

        from paceline.models.kinds import saved_kind

        auto_class = getattr(transformers, saved_kind(folder).auto_class)
        trust: dict[str, bool] = {"trust_remote_code": True} if trusts_code else {}
        model = auto_class.from_pretrained(str(folder), dtype=dtype, **trust)
        return cls(model, transformers.AutoTokenizer.from_pretrained(str(folder), **trust))

    def encode(self, prompt: ProofPrompt) -> list[int]:
        if self.tokenizer.chat_template is None or prompt.content == "plain":
            return list(self.tokenizer(prompt.text)["input_ids"])
        text = rendered(self.tokenizer, prompt)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.no_grad()
    def scores(self, tokens: list[int], start: int) -> torch.Tensor:
        """Return logits of each token from ``start``; of a classifier, the logits of its classes:
        float32 [1, classes]."""
        ids = torch.tensor([tokens], device=self.model.device)
        logits: torch.Tensor = self.model(input_ids=ids).logits
        return (logits[0, start:] if logits.dim() == 3 else logits).float().cpu()

    @torch.no_grad()
    def generate(self, tokens: list[int], num_tokens: int) -> list[int]:
        """Return the most likely tokens, also after the end of an answer; none for a classifier."""
        from transformers import GenerationConfig

        model = base_model(self.model)
        if not model.can_generate():
            return []
        ids = torch.tensor([tokens], device=self.model.device)
        settings = model.generation_config
        model.generation_config = GenerationConfig()  # so that no token is suppressed or ends it
        try:
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(
                    max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
                ),
            )
        finally:
            model.generation_config = settings
        answer: list[int] = output[0, len(tokens) :].tolist()
        return answer
