"""Embeddings of the tokens that a config adds to the vocabulary."""

from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.data.text.new_tokens import NewTokens, config_tokenizer, read_new_tokens
from paceline.models.blocks import base_model
from paceline.models.builtin import resolve_model
from paceline.models.weights.load import convert_weights, unmark_files

#: Without adapters, the size of an enlarged vocabulary is a multiple of this, so that
#: `parallel.tensor` can split the head.
_MULTIPLE = 64


def add_token_embeddings(model: Any, config: Config) -> None:
    """Give the added tokens an embedding and a row of the head: the mean of the other tokens'
    embeddings and the mean of their rows (Hewitt, "Initializing New Word Embeddings for Pretrained
    Language Models", 2021).

    The embeddings are enlarged only if they have no rows for these tokens. With adapters, they then
    have as many rows as the tokenizer has tokens, which is what peft expects.
    """
    added = added_tokens(config)
    if added is None:
        return
    convert_weights(_weights(model))
    num_rows = int(model.get_input_embeddings().weight.shape[0])
    if added.num_tokens > num_rows:
        multiple = None if config.lora.enable else _MULTIPLE
        model.resize_token_embeddings(
            added.num_tokens, pad_to_multiple_of=multiple, mean_resizing=False
        )
    with torch.no_grad():
        for weight in _weights(model):
            unmark_files(weight)
            new_rows = sorted({*added.ids, *range(num_rows, weight.shape[0])})
            if not weight.is_meta:
                mean = weight[: new_rows[0]].mean(0, dtype=torch.float32)
                weight[new_rows] = mean.to(weight.dtype)


def added_tokens(config: Config) -> NewTokens | None:
    """Return the tokens that the config adds, or None if the tokenizer has all of them."""
    if not config.adds_tokens:
        return None
    added = read_new_tokens(config_tokenizer(config, resolve_model))
    return added if added.ids else None


def embedding_names(model: Any) -> list[str]:
    """Return the names of the modules of :func:`_tables`, which have a weight each."""
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(table)] for table in _tables(model)]


def has_tied_head(model: Any) -> bool:
    """Return whether the head has the weight of the embeddings."""
    return model.get_output_embeddings() is not None and len(_tables(model)) == 1


def check_token_embeddings(model: nn.Module, config: Config) -> None:
    """Raise ConfigError if tokens are added and their embeddings are frozen."""
    if added_tokens(config) is None:
        return
    trained = {id(weight) for weight in model.parameters() if weight.requires_grad}
    if any(id(weight) not in trained for weight in _weights(base_model(model))):
        raise ConfigError(
            "`new_tokens` and `new_special_tokens` add tokens whose embeddings would not be"
            " trained: the embeddings or the head are frozen",
            code="frozen-new-tokens",
            fix="train them too (`train_args.freeze`, `trainable`, `trainable_layers`;"
            " `modules_to_save` of `lora.adapter`), or do not add tokens",
        )


def _tables(model: Any) -> list[Any]:
    """Return the embeddings and, if it has a weight of its own, the head."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_separate = head is not None and head.weight is not embeddings.weight
    return [embeddings, head] if is_separate else [embeddings]


def _weights(model: Any) -> list[nn.Parameter]:
    return [table.weight for table in _tables(model)]
