"""The tokenizer and the chat template in a GGUF file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from paceline.core.errors import ConfigError
from paceline.data.text.qwen_tokenizer import folder_template
from paceline.inference.exports.gguf.pretokenizers import pre_tokenizer_name
from paceline.models.json_config import read_object

if TYPE_CHECKING:
    import gguf

_BYTE = re.compile(r"^<0x[0-9A-F]{2}>$")
_SPACE = "▁"
#: The blocks that mark answers. Other renderers than transformers may not know them.
_GENERATION = re.compile(r"(\{%-?\s*)(end)?generation(\s*-?%\})")


@dataclass
class GgufTokenizer:
    """What a GGUF file says about a tokenizer.

    Args:
        model: ``gpt2`` for byte-level tokenizers, ``llama`` for SentencePiece's.
        pre: llama.cpp's name for how texts are split.
        tokens: texts of all tokens, by number.
        types: ``gguf.TokenType`` of each.
        scores: scores of each, for ``llama``.
        merges: pairs that are merged, for ``gpt2``.
        special: number of each special token, such as ``bos``.
        adds_start: whether a text begins with the first token.
        adds_space: whether a space is added before a text.
        chat_template: Jinja template, if there is one.
    """

    model: str
    pre: str
    tokens: list[str]
    types: list[int]
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)
    adds_start: bool = False
    adds_space: bool = False
    chat_template: str | None = None

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Add the tokenizer to a file's metadata."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        if self.model == "llama":
            writer.add_token_scores(self.scores)
            writer.add_add_space_prefix(self.adds_space)
        else:
            writer.add_token_merges(self.merges)
        writer.add_add_bos_token(self.adds_start)
        writer.add_add_eos_token(False)
        for name, number in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def refuse_tokenizer(folder: Path, reason: str) -> ConfigError:
    """Return the error for a tokenizer that llama.cpp does not have."""
    return ConfigError(
        "the tokenizer in {folder} cannot be written to a GGUF file: {reason}",
        code="gguf-unsupported-tokenizer",
        allowed="byte-level tokenizers that split texts as Qwen2, Qwen3.5, Llama 3, GPT-2, GPT-4o,"
        " Mistral or SmolLM, and SentencePiece's byte-pair tokenizers of Llama 2 and Gemma",
        fix="export another form of the model, such as `--merge` for adapters",
        folder=folder,
        reason=reason,
    )


def read_tokenizer(folder: Path, vocab_size: int | None = None) -> GgufTokenizer:
    """Read the tokenizer of a model's folder.

    Args:
        vocab_size: number of rows of the model's embedding; by default, as many
            as the tokenizer has tokens.

    Raises:
        ConfigError: llama.cpp does not have such a tokenizer.
    """
    content = read_object(folder / "tokenizer.json")
    if content is None:
        raise refuse_tokenizer(folder, "there is no tokenizer.json")
    model = _object(content, "model")
    kind = model.get("type")
    if kind != "BPE":
        raise refuse_tokenizer(folder, f"it is of type {kind}, not BPE")
    texts = _texts_by_number(content, model)
    size = vocab_size or max(texts) + 1
    if texts and max(texts) >= size:
        raise refuse_tokenizer(
            folder, f"it has {max(texts) + 1} tokens, and the model's embedding {size}"
        )
    tokens = [texts.get(number, f"[PAD{number}]") for number in range(size)]
    settings = read_object(folder / "tokenizer_config.json") or {}
    special = _special_tokens(settings, {text: number for number, text in texts.items()})
    _add_end_tokens(folder, special)
    if model.get("byte_fallback"):
        result = _sentencepiece(folder, content, model, tokens)
    else:
        result = _byte_level(folder, content, model, tokens)
    result.types = _types(content, texts, tokens, special.get("unknown"))
    result.special = special
    result.chat_template = plain_template(folder, special)
    result.adds_start = _adds_start(content, tokens, special.get("bos"))
    if result.adds_start and result.chat_template is not None:
        # llama.cpp would add the token to a chat whose template does not begin with it.
        start = tokens[special["bos"]]
        result.adds_start = any(mark in result.chat_template for mark in ("bos_token", start))
    return result


def plain_template(folder: Path, special: dict[str, int]) -> str | None:
    """Return the chat template of a folder without the blocks that mark answers; None without one.

    A special token that the tokenizer does not have is empty in transformers. llama.cpp has a
    default for it, such as number 11, so the template sets it.

    Args:
        special: number of each special token.
    """
    template = folder_template(folder)
    if template is None:
        return None
    for name in ("bos", "eos"):
        if name not in special and f"{name}_token" in template:
            template = f"{{% set {name}_token = '' %}}{template}"
    return _GENERATION.sub(
        lambda match: f"{match[1]}{'endif' if match[2] else 'if true'}{match[3]}", template
    )


def _object(content: dict[str, JsonValue], key: str) -> dict[str, JsonValue]:
    value = content.get(key)
    return value if isinstance(value, dict) else {}


def _objects(content: dict[str, JsonValue], key: str) -> list[dict[str, JsonValue]]:
    value = content.get(key)
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _texts_by_number(content: dict[str, JsonValue], model: dict[str, JsonValue]) -> dict[int, str]:
    texts = {
        number: text for text, number in _object(model, "vocab").items() if isinstance(number, int)
    }
    for token in _objects(content, "added_tokens"):
        number = token.get("id")
        if isinstance(number, int):
            texts[number] = str(token.get("content"))
    return texts


def _types(
    content: dict[str, JsonValue], texts: dict[int, str], tokens: list[str], unknown: int | None
) -> list[int]:
    from gguf import TokenType

    is_fallback = bool(_object(content, "model").get("byte_fallback"))
    types = []
    for number, text in enumerate(tokens):
        if number not in texts:
            types.append(TokenType.UNUSED)
        elif is_fallback and _BYTE.match(text):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
    for token in _objects(content, "added_tokens"):
        added = token.get("id")
        if isinstance(added, int):
            types[added] = TokenType.CONTROL if token.get("special") else TokenType.USER_DEFINED
            if types[added] == TokenType.USER_DEFINED and is_fallback:
                tokens[added] = tokens[added].replace(_SPACE, " ")
    if is_fallback and unknown is not None:
        types[unknown] = TokenType.UNKNOWN
    return [int(kind) for kind in types]


def _byte_level(
    folder: Path,
    content: dict[str, JsonValue],
    model: dict[str, JsonValue],
    tokens: list[str],
) -> GgufTokenizer:
    pre = pre_tokenizer_name(content.get("pre_tokenizer"), bool(model.get("ignore_merges")))
    if pre is None:
        raise refuse_tokenizer(folder, "llama.cpp does not split texts in this way")
    return GgufTokenizer("gpt2", pre, tokens, [], merges=[" ".join(pair) for pair in _pairs(model)])


def _pairs(model: dict[str, JsonValue]) -> list[tuple[str, str]]:
    """Return the pairs that are merged, which older files store as one text with a space."""
    pairs = []
    merges = model.get("merges")
    for merge in merges if isinstance(merges, list) else []:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if isinstance(parts, list) and len(parts) == 2:
            pairs.append((str(parts[0]), str(parts[1])))
    return pairs


def _sentencepiece(
    folder: Path,
    content: dict[str, JsonValue],
    model: dict[str, JsonValue],
    tokens: list[str],
) -> GgufTokenizer:
    """Return a tokenizer that merges the pair with the highest score: minus the rank of the first
    merge that gives a token."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(_pairs(model)):
        ranks.setdefault("".join(pair), rank)
    if any(f"<0x{byte:02X}>" not in _object(model, "vocab") for byte in range(256)):
        raise refuse_tokenizer(folder, "it lacks tokens for single bytes")
    lowest = -float(len(ranks) + 1)
    scores = [-float(ranks[text]) if text in ranks else lowest for text in tokens]
    return GgufTokenizer(
        "llama", "default", tokens, [], scores=scores, adds_space=_adds_space(folder, content)
    )


def _adds_space(folder: Path, content: dict[str, JsonValue]) -> bool:
    """Return whether a space is added before a text.

    Raises:
        ConfigError: texts are changed in a way that llama.cpp does not have.
    """
    steps = [_object(content, "normalizer"), _object(content, "pre_tokenizer")]
    steps += [inner for step in steps for inner in _objects(step, "normalizers")]
    steps += [inner for step in steps for inner in _objects(step, "pretokenizers")]
    adds, replaces = False, False
    for step in steps:
        kind = step.get("type")
        if kind == "Metaspace":
            replaces = True
            adds = step.get("prepend_scheme") == "always" or (
                step.get("prepend_scheme") == "first" and folder_template(folder) is None
            )
        elif kind == "Prepend":
            adds = step.get("prepend") == _SPACE
        elif kind == "Replace":
            replaces = replaces or step.get("content") == _SPACE
        elif kind not in (None, "Sequence", "Split"):
            raise refuse_tokenizer(folder, f"it changes texts by `{kind}`")
    if not replaces:
        raise refuse_tokenizer(folder, "it does not replace spaces")
    return adds


#: Keys of tokenizer_config.json → names in GGUF files.
_SPECIAL = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
}


def _special_tokens(settings: dict[str, JsonValue], numbers: dict[str, int]) -> dict[str, int]:
    special = {}
    for key, name in _SPECIAL.items():
        value = settings.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and text in numbers:
            special[name] = numbers[text]
    return special


def _add_end_tokens(folder: Path, special: dict[str, int]) -> None:
    """Add the tokens that end an answer, by generation_config.json: the tokenizer's own end token
    may be another."""
    value = (read_object(folder / "generation_config.json") or {}).get("eos_token_id")
    ends = [each for each in (value if isinstance(value, list) else [value]) if type(each) is int]
    if ends and "eos" not in special:
        special["eos"] = ends[0]
    others = [each for each in ends if each != special.get("eos")]
    if others:
        special["eot"] = others[0]


def _adds_start(content: dict[str, JsonValue], tokens: list[str], start: int | None) -> bool:
    """Return whether the post-processor adds the first token before a text."""
    if start is None:
        return False
    step = _object(content, "post_processor")
    steps = [step, *_objects(step, "processors")]
    for each in steps:
        single = _objects(each, "single")
        if single and _object(single[0], "SpecialToken").get("id") == tokens[start]:
            return True
    return False
