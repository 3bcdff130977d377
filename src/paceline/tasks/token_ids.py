"""Check that the model has an embedding for each token of the data."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.encoding.prepare import PreparedTokens
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.blocks import base_model
from paceline.models.builtin import config_numbers
from paceline.models.classifiers.texts import any_text_classifier
from paceline.models.json_config import first_number, language_fields
from paceline.models.language import language_model_on_meta
from paceline.models.new_tokens import added_tokens


def check_token_ids(config: Config, tokens: PreparedTokens) -> None:
    """Check that the tokenized data has no token beyond the embeddings of the model, and none with
    loss beyond its logits.

    Raises:
        ConfigError: it has one, so that the first step with it would fail.
    """
    table = _Vocabulary(config)
    for key, folder in (("dataset", tokens.train_folder), ("val_dataset", tokens.eval_folder)):
        if folder is None or table.has(TokenDataset(folder).largest_token()):
            continue
        largest = TokenDataset(folder).largest_token()
        what, limit = "embeddings", table.num_embeddings
        if table.has_embedding(largest):
            largest = TokenDataset(folder).largest_label()
            what, limit = "logits", table.num_logits
        if limit is not None and largest >= limit:
            tokenizer = load_tokenizer(Path(tokens.tokenizer_path), config.trust_remote_code)
            raise ConfigError(
                "`{key}` has the token {largest} (`{token}`), but `model: {model}` has {subject}"
                " for tokens 0 to {last_limit} only",
                code="token-beyond-embeddings",
                fix="use the tokenizer of this model: leave `tokenizer` out. To add the token to"
                " the model, list it in `new_tokens` or `new_special_tokens`",
                key=key,
                largest=largest,
                token=tokenizer.token(largest),
                model=config.model,
                subject=what,
                last_limit=limit - 1,
            )


def token_notices(config: Config, tokenizer_path: str) -> list[Notice]:
    """Return a warning if streamed rows, whose tokens are not known yet, may have tokens beyond
    the embeddings of the model."""
    table = _Vocabulary(config)
    tokenizer = load_tokenizer(Path(tokenizer_path), config.trust_remote_code)
    if table.has_embedding(tokenizer.vocab_size - 1):
        return []
    text = UserText(
        "the tokenizer has {vocab_size} tokens, and the model has embeddings for the first"
        " {num_embeddings} only: a streamed row with another token ends the training",
        code="tokenizer-beyond-embeddings",
        vocab_size=tokenizer.vocab_size,
        num_embeddings=table.num_embeddings,
    )
    return [Notice("warning", text)]


class _Vocabulary:
    """The tokens that a model has embeddings and logits for. The model is built, on the meta
    device, only for tokens that are not below the size in its config.json: some families have more
    embeddings than that, such as Llama 3.2 Vision for its image token."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def has(self, token: int) -> bool:
        """Return whether the model has an embedding and a logit for a token; true if unknown."""
        return self._stated is None or token < self._stated or self._has(token, self._sizes)

    def has_embedding(self, token: int) -> bool:
        return self.has(token) or self._has(token, self._sizes[:1])

    @property
    def num_embeddings(self) -> int | None:
        return self._sizes[0]

    @property
    def num_logits(self) -> int | None:
        """The number of logits per token; None if the model classifies texts."""
        return self._sizes[1]

    @staticmethod
    def _has(token: int, sizes: Sequence[int | None]) -> bool:
        return all(size is None or token < size for size in sizes)

    @cached_property
    def _stated(self) -> int | None:
        """The size in config.json; None if it is unknown or adapts to the tokenizer."""
        if added_tokens(self._config) is not None:
            return None
        return first_number(language_fields(config_numbers(self._config.model)), "vocab_size")

    @cached_property
    def _sizes(self) -> tuple[int | None, int | None]:
        """The numbers of embeddings and of logits per token."""
        kind = any_text_classifier(self._config)
        try:
            model: Any = base_model(language_model_on_meta(self._config, kind=kind))
        except ConfigError:  # reported when the model is loaded
            return self._stated, self._stated
        head = model.get_output_embeddings()
        num_embeddings = int(model.get_input_embeddings().weight.shape[0])
        return num_embeddings, None if head is None else int(head.weight.shape[0])
