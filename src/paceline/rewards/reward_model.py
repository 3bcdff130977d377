"""A reward model: a classifier with one label, which ``task: reward`` trains."""

from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForSequenceClassification

from paceline.core.errors import ConfigError, RunError, first_line
from paceline.data.text.chat_template import ChatTemplate, TemplateRefused
from paceline.data.text.chats.tool_calls import ChatMessage
from paceline.data.text.tokenizer import load_tokenizer
from paceline.rewards.group import CompletionGroup, Content


class RewardModel:
    """Scores completions with a model of transformers for sequence classification, in float32 on
    the device of a rank. Texts become tokens as in the training of the model: the chat template of
    its tokenizer if the prompt is a chat, else the special tokens around prompt and completion.

    Args:
        folder: local folder with the model and its tokenizer.

    Raises:
        ConfigError: the model or its tokenizer cannot be loaded.
    """

    def __init__(self, folder: str, device: torch.device | str) -> None:
        self.folder, self.device = folder, torch.device(device)
        path = Path(folder).expanduser()
        self.tokenizer = load_tokenizer(path)
        try:
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                str(path), dtype=torch.float32
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                "the reward model {folder} cannot be loaded: {reason}",
                code="reward-model-not-loaded",
                fix="check that it is the model folder of a finished `task: reward`",
                folder=folder,
                reason=first_line(error),
            ) from error
        self.model = model.eval().requires_grad_(False).to(self.device)
        # A decoder takes the reward at the last token that is not this one.
        if self.model.config.pad_token_id is None:
            self.model.config.pad_token_id = self.tokenizer.pad_token_id
        source = self.tokenizer.chat_template
        self._template = source and ChatTemplate(source, self.tokenizer.special_tokens)

    def score(self, group: CompletionGroup) -> list[float]:
        """Return the reward of each completion of a prompt, from one batch.

        Raises:
            RunError: the model has no chat template or its template refuses the chat, or it does
                not accept as many tokens.
        """
        texts = [self._text(group, completion) for completion in group.completions]
        rows = self.tokenizer.encode_batch(texts, add_special_tokens=False)
        if isinstance(group.prompt, str):  # in a chat, the template has written them
            ends = self.tokenizer
            rows = [[*ends.missing_start(row), *row, *ends.missing_end(row)] for row in rows]
        self._check_length(max(map(len, rows)), group)
        ids, mask = self._pad(rows)
        with torch.inference_mode():
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        rewards: list[float] = logits[:, 0].float().tolist()
        return rewards

    def _pad(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token ids and attention mask, int64 [rows, longest]."""
        shape = len(rows), max(map(len, rows))
        ids = torch.full(shape, self.model.config.pad_token_id, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            mask[number, : len(row)] = 1
        return ids.to(self.device), mask.to(self.device)

    def _text(self, group: CompletionGroup, completion: Content) -> str:
        """Return the text of the prompt with a completion."""
        if isinstance(group.prompt, str):
            return self.tokenizer.without_space_after_end(group.prompt + str(completion))
        problem = "it has no chat template"
        if self._template:
            messages = cast(list[ChatMessage], [*group.prompt, *completion])
            try:
                return self._template.render(messages)
            except TemplateRefused as error:
                problem = f"its chat template refuses the chat: {error}"
        raise RunError(
            "the reward model {folder} cannot read the chat of {place}: {problem}",
            code="reward-model-template",
            folder=self.folder,
            place=group.place,
            problem=problem,
        )

    def _check_length(self, length: int, group: CompletionGroup) -> None:
        limit = getattr(self.model.config, "max_position_embeddings", None)
        if limit and length > limit:
            raise RunError(
                "a completion of {place} with its prompt has {length} tokens, and the reward model"
                " {folder} accepts {limit}",
                code="reward-model-too-short",
                fix="lower `grpo.max_completion_length`, or use another reward model",
                place=group.place,
                length=length,
                folder=self.folder,
                limit=limit,
            )
