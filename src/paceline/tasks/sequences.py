"""Tasks whose loss weights the tokens of each sequence by what it computes from them."""

from typing import Any

import torch
from torch.nn import functional

from paceline.core.errors import ConfigError
from paceline.models import attention
from paceline.models.context.place import sum_over_parts
from paceline.models.head.chunked_loss import ChunkedLoss, chunked_loss
from paceline.models.head.softmax import IGNORED, LogitTransform
from paceline.models.head.transform import output_head
from paceline.tasks.language import LanguageTask


class SequenceTask(LanguageTask):
    """A task with a causal language model whose loss is not a sum of the losses of tokens."""

    is_language_model = False  # the samples are not the prompts that text is generated from

    def _refuse(self, *settings: tuple[object, str, str]) -> None:
        """Refuse settings of ``train_args`` that the loss does not support.

        Args:
            settings: whether each is set, the setting, and the reason.

        Raises:
            ConfigError: one of them is set.
        """
        for is_set, setting, reason in settings:
            if is_set:
                raise ConfigError(
                    "`train_args.{setting}` is not supported with `task: {task}`: {reason}",
                    code="setting-with-preference",
                    fix="leave `train_args.{key}` out",
                    setting=setting,
                    task=self.config.task,
                    reason=reason,
                    key=setting.partition(":")[0],
                )

    def _sum_by_sequence(self, losses: torch.Tensor, batch: Any) -> torch.Tensor:
        if losses.dim() == 2:
            return losses.sum(dim=1)
        # In the same order on every device, unlike a sum with atomic additions.
        counts = batch["target_counts" if self.place is None else "local_target_counts"]
        sums = torch.stack([part.sum() for part in losses.split(counts)])
        return sums if self.place is None else sum_over_parts(sums, self.place)

    def _token_losses(
        self,
        model: Any,
        batch: Any,
        temperature: float = 1.0,
        entropies: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the negative log-probability of each target in nats, float32 in the shape of the
        targets, 0 for those that are padding.

        Args:
            temperature: divisor of the logits.
            entropies: receives the entropy of the distribution of each target, float32 [targets],
                unless None.
        """
        inputs = self._inputs(batch)
        keep, targets = batch["keep"], batch["targets"]
        if self.picks_logits:
            inputs["logits_to_keep"] = keep
        losses: torch.Tensor
        with attention.known_padding(batch.get("attention_mask"), batch["num_tokens"]):
            if self._transform is None or not self._chunks.divides(targets.numel()):
                logits = model(**inputs).logits
                if not self.picks_logits:
                    logits = logits[:, keep]
                logits = logits.flatten(0, 1).float()
                if temperature != 1.0:
                    logits = logits / temperature
                losses = functional.cross_entropy(
                    logits, targets.flatten(), reduction="none", ignore_index=IGNORED
                )
                if entropies is not None:
                    probabilities = logits.detach().softmax(-1)
                    entropies.copy_(torch.special.entr(probabilities).sum(-1))
            else:
                chunks = ChunkedLoss(
                    output_head(model),
                    _divided(self._transform, temperature),
                    targets,
                    None if self.picks_logits else keep,
                    self._chunks.tokens,
                    is_per_token=True,
                    token_entropies=entropies,
                )
                with chunked_loss(chunks):
                    losses = chunks.result(model(**inputs).logits)
        return losses.view(targets.shape)


def _divided(transform: LogitTransform, temperature: float) -> LogitTransform:
    """Return the function whose result is divided by the temperature."""
    cap = None if transform.cap is None else transform.cap / temperature
    return LogitTransform(transform.scale / temperature, cap)
