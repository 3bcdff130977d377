"""Check that the model has an embedding for each token of the data."""

from pathlib import Path

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.data.text.prepare import PreparedTokens
from paceline.data.text.token_dataset import TokenDataset
from paceline.data.text.tokenizer import load_tokenizer
from paceline.models.builtin import config_numbers
from paceline.models.json_config import first_number, language_fields


def check_token_ids(config: Config, tokens: PreparedTokens) -> None:
    """Check that the tokenized data has no token beyond the embeddings of the model.

    Raises:
        ConfigError: it has one, so that the first step with it would fail.
    """
    num_rows = _num_embeddings(config)
    if num_rows is None:
        return
    for key, folder in (("dataset", tokens.train_folder), ("val_dataset", tokens.eval_folder)):
        largest = 0 if folder is None else TokenDataset(folder).largest_token()
        if largest >= num_rows:
            tokenizer = load_tokenizer(Path(tokens.tokenizer_path), config.trust_remote_code)
            raise ConfigError(
                f"`{key}` has the token {largest} (`{tokenizer.token(largest)}`), but `model:"
                f" {config.model}` has embeddings for tokens 0 to {num_rows - 1} only",
                fix=(
                    "use the tokenizer of this model: leave `tokenizer` out. To add the token to"
                    " the model, list it in `new_tokens` or `new_special_tokens`"
                ),
            )


def token_notices(config: Config, tokenizer_path: str) -> list[Notice]:
    """Return a warning if streamed rows, whose tokens are not known yet, may have tokens beyond
    the embeddings of the model."""
    num_rows = _num_embeddings(config)
    if num_rows is None:
        return []
    tokenizer = load_tokenizer(Path(tokenizer_path), config.trust_remote_code)
    if tokenizer.vocab_size <= num_rows:
        return []
    text = (
        f"the tokenizer has {tokenizer.vocab_size} tokens, and the model has embeddings for the"
        f" first {num_rows} only: a streamed row with another token ends the training"
    )
    return [Notice("warning", text)]


def _num_embeddings(config: Config) -> int | None:
    """Return the number of embeddings in the model's config.json, or None if it is unknown or
    adapts to the tokenizer."""
    if config.adds_tokens:
        return None
    return first_number(language_fields(config_numbers(config.model)), "vocab_size")
