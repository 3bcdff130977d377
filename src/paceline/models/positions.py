"""Read the number of positions of a language model from its config.json, and check ``max_length``
against it. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.models.builtin import config_numbers
from paceline.models.json_config import JsonObject, first_number, language_fields

#: Keys of the number of positions in a config.json, the most reliable first.
_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "max_sequence_length",
    "n_ctx",
    "context_length",
    "seq_length",
)

#: Models without a limit on positions: linear biases (ALiBi) or recurrent states.
_UNLIMITED = frozenset({
    "bloom", "mpt", "rwkv", "mamba", "mamba2", "falcon_mamba", "xlstm", "recurrent_gemma",
})  # fmt: skip

#: Models whose positions begin after the ID of the padding token.
_OFFSET = frozenset({
    "roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm",
    "data2vec-text", "xmod",
})  # fmt: skip


@dataclass(frozen=True)
class PositionLimit:
    """The maximum number of tokens in a sample.

    Args:
        tokens: the maximum number of tokens.
        key: its key in config.json, e.g. ``n_positions``.
        is_fixed: whether the model cannot process longer samples.
    """

    tokens: int
    key: str
    is_fixed: bool


def position_limit(content: JsonObject) -> PositionLimit | None:
    """Return the limit in a config.json, including RoPE scaling, or None if it contains no
    limit."""
    content = language_fields(content)
    for key in _KEYS:
        value = first_number(content, key)
        if value is not None:
            kind = content.get("model_type")
            if kind in _OFFSET:
                padding = content.get("pad_token_id")
                value -= (padding if isinstance(padding, int) else 1) + 1
            is_fixed = kind not in _UNLIMITED and not content.get("alibi")
            return PositionLimit(max(value, _scaled(content, value)), key, is_fixed)
    return None


def _scaled(content: JsonObject, positions: int) -> int:
    """Return the number of positions that RoPE scaling covers, or 0 without it."""
    scaling = content.get("rope_scaling") or content.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return 0
    nested = [value for value in scaling.values() if isinstance(value, Mapping)]
    return max(_scaled_by(part, positions) for part in (scaling, *nested))


def _scaled_by(scaling: JsonObject, positions: int) -> int:
    factor = scaling.get("factor")
    if not isinstance(factor, int | float) or scaling.get("rope_type", scaling.get("type")) in (
        None,
        "default",
    ):
        return 0
    original = scaling.get("original_max_position_embeddings")
    return int(factor * (original if isinstance(original, int) else positions))


def fit_length(loaded: Loaded) -> Loaded:
    """Check ``train_args.max_length`` against the positions of the model, if its config.json can be
    read. A default value is lowered to the limit, with a notice.

    Raises:
        ConfigError: a configured value exceeds a fixed limit.
    """
    config = loaded.config
    if config.task not in CAUSAL_TASKS:
        return loaded
    limit = position_limit(config_numbers(config.model))
    args = config.train_args
    if limit is None or args.max_length <= limit.tokens:
        return loaded
    if not limit.is_fixed:
        text = UserText(
            "`train_args.max_length: {max_length}` exceeds the {tokens} tokens of the model's"
            " `{limit}`. The model has no fixed limit, so longer samples are used unchanged",
            code="max-length-beyond-positions",
            max_length=args.max_length,
            tokens=limit.tokens,
            limit=limit.key,
        )
        return replace(loaded, notices=[*loaded.notices, ("warning", text)])
    if "max_length" in args.model_fields_set:
        raise _too_long(config, limit)
    lowered = args.model_copy(update={"max_length": limit.tokens})
    text = UserText(
        "max_length: {max_length} (the default) → {tokens}, the positions of the model (`{limit}`)",
        code="max-length-lowered",
        max_length=args.max_length,
        tokens=limit.tokens,
        limit=limit.key,
    )
    return replace(
        loaded,
        config=config.model_copy(update={"train_args": lowered}),
        notices=[*loaded.notices, ("info", text)],
    )


def check_length(config: Config, content: JsonObject) -> None:
    """Check ``max_length`` against a loaded model, whose config.json may not have been available
    before.

    Raises:
        ConfigError: ``max_length`` exceeds a fixed limit.
    """
    limit = position_limit(content)
    if limit is not None and limit.is_fixed and config.train_args.max_length > limit.tokens:
        raise _too_long(config, limit)


def _too_long(config: Config, limit: PositionLimit) -> ConfigError:
    return ConfigError(
        "`train_args.max_length: {max_length}` exceeds the {tokens} positions of the model"
        " (`{limit}` in its config.json)",
        code="too-long",
        allowed="at most {tokens}; a model with rotary positions can be extended by `rope_scaling`"
        " in its config.json",
        fix="set `train_args.max_length: {tokens}`; what happens to longer samples is set by"
        " `train_args.truncation_strategy`",
        max_length=config.train_args.max_length,
        tokens=limit.tokens,
        limit=limit.key,
    )
