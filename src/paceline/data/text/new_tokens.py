"""Tokenizers that a config changes: with `new_tokens` and `new_special_tokens`, or with another
`eos_token` or `bos_token`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.core.errors import ConfigError, did_you_mean
from paceline.core.files import cache_dir, write_json_atomic
from paceline.data.cache import build_once, key_of
from paceline.data.text.tokenizer import added_ids, find_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from paceline.config.schema import Config

#: Converts the name of a model in the config to a local folder or a hub id.
ResolveModel = Callable[[str], str]

_LAYOUT = 2
_ADDED = "paceline_new_tokens.json"


class NewTokens(NamedTuple):
    """Tokens that were added to a tokenizer.

    Args:
        ids: their token ids; without those that the tokenizer had before.
        num_tokens: the highest token id of the tokenizer plus one.
    """

    ids: list[int]
    num_tokens: int


def config_tokenizer(config: Config, resolve_model: ResolveModel) -> Path:
    """Return the local folder of the tokenizer of a config, with its new tokens and its special
    tokens.

    Raises:
        ConfigError: the tokenizer does not exist or cannot be loaded, or does not have the special
            tokens.
    """
    name = resolve_model(config.tokenizer or config.model)
    folder = find_tokenizer(name, config.trust_remote_code)
    if not config.changes_tokenizer:
        return folder
    key = key_of(
        [
            "new tokens",
            _LAYOUT,
            tokenizer_fingerprint(folder),
            config.new_tokens,
            config.new_special_tokens,
            config.eos_token,
            config.bos_token,
        ]
    )
    final = cache_dir() / "tokenizers" / key
    build_once(final, _ADDED, lambda staging: _write(config, folder, staging))
    return final


def read_new_tokens(folder: Path) -> NewTokens:
    """Return the tokens that were added to the tokenizer in a folder of
    :func:`config_tokenizer`."""
    return NewTokens(**json.loads((folder / _ADDED).read_text(encoding="utf-8")))


def _write(config: Config, source: Path, target: Path) -> None:
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        str(source), trust_remote_code=config.trust_remote_code
    )
    before = set(tokenizer.get_vocab().values())
    for tokens, is_special in ((config.new_tokens, False), (config.new_special_tokens, True)):
        tokenizer.add_tokens(
            [AddedToken(token, special=is_special, normalized=False) for token in tokens],
            special_tokens=is_special,
        )
    vocabulary = tokenizer.get_vocab()
    for key in ("eos_token", "bos_token"):
        token = getattr(config, key)
        if token is None:
            continue
        if token not in vocabulary:
            raise _not_in_vocabulary(key, token, tokenizer.get_added_vocab())
        former = getattr(tokenizer, f"{key}_id")
        setattr(tokenizer, key, AddedToken(token, special=True, normalized=False))
        _replace_around_texts(tokenizer, key == "eos_token", former, vocabulary[token])
    tokenizer.save_pretrained(str(target))
    for pattern in ("*processor_config.json", "config.json"):
        for file in source.glob(pattern):
            shutil.copyfile(file, target / file.name)
    ids = set(vocabulary.values())
    added = NewTokens(sorted(ids - before), max(ids) + 1)
    write_json_atomic(target / _ADDED, dict(added._asdict()))


def _replace_around_texts(tokenizer: Any, is_end: bool, former: int | None, token: int) -> None:
    """Let a tokenizer that adds its former bos or eos token to texts add another token instead.

    Args:
        is_end: whether the token is the eos token.
        former, token: token ids.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    around = added_ids(backend, tokenizer)
    if backend is None or former not in around[is_end]:
        return
    from tokenizers.processors import ByteLevel, Sequence, TemplateProcessing

    replaced = [token if old == former else old for old in around[is_end]]
    start, end = (around[0], replaced) if is_end else (replaced, around[1])
    names = {number: backend.id_to_token(number) for number in (*start, *end)}
    before, after = ([names[number] for number in part] for part in (start, end))
    template = TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *(f"{name}:1" for name in before), "$B:1"]
        + [f"{name}:1" for name in after],
        special_tokens=[(name, number) for number, name in names.items()],
    )
    state = backend.post_processor.__getstate__().decode().replace(" ", "")
    offsets = ByteLevel(trim_offsets='"trim_offsets":true' in state)
    backend.post_processor = Sequence([offsets, template]) if "ByteLevel" in state else template


def _not_in_vocabulary(key: str, token: str, added: Collection[str]) -> ConfigError:
    return ConfigError(
        "`{key}: {token}`: the tokenizer has no such token",
        code="unknown-token",
        allowed="a token of the tokenizer, or of `new_special_tokens`",
        fix=did_you_mean(token, added, "add it to the vocabulary: list it in `new_special_tokens`"),
        key=key,
        token=token,
    )
