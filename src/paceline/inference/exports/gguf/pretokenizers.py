"""How byte-level tokenizers split texts before they merge bytes, and llama.cpp's names for it.

llama.cpp has each way under a name (``llm_tokenizer_bpe`` in its ``src/llama-vocab.cpp``). Its
converter recognizes a tokenizer by the tokens of one text; here the definition in tokenizer.json is
compared, so a trained or extended vocabulary does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import JsonValue

from paceline.data.text.qwen_tokenizer import QWEN2_PATTERN

#: The expression of GPT-2, which the byte-level splitter of the package tokenizers has built in.
_GPT2 = "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"
_LLAMA3 = QWEN2_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}|"
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _cased(suffix: str, digits: str) -> str:
    """Return the expression of GPT-4o and Mistral, which splits between small and capital
    letters."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{start}{_UPPER}*{_LOWER}+{suffix}|{start}{_UPPER}+{_LOWER}*{suffix}|{digits}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class Splitting:
    """What splits a text.

    Args:
        expressions: regular expressions, each applied to the parts of the one before.
        ignores_merges: whether a part that is a token is one, whatever the merges say.
    """

    expressions: tuple[str, ...]
    ignores_merges: bool


_DIGIT, _DIGITS = r"\p{N}", r"\p{N}{1,3}"
#: Way of splitting → its name in llama.cpp.
KNOWN_SPLITTINGS = {
    Splitting((QWEN2_PATTERN,), False): "qwen2",
    Splitting((_QWEN35,), False): "qwen35",
    Splitting((_LLAMA3,), True): "llama-bpe",
    Splitting((_LLAMA3,), False): "smaug-bpe",
    Splitting((_GPT2,), False): "gpt-2",
    Splitting((_DIGIT, _GPT2), False): "smollm",
    Splitting((_cased(_SUFFIX, _DIGITS),), False): "gpt-4o",
    Splitting((_cased("", _DIGIT),), True): "tekken",
}


def pre_tokenizer_name(pre_tokenizer: JsonValue, ignores_merges: bool) -> str | None:
    """Return llama.cpp's name for the ``pre_tokenizer`` of a tokenizer.json, or None if it does not
    have it."""
    expressions = _expressions(pre_tokenizer)
    if expressions is None:
        return None
    return KNOWN_SPLITTINGS.get(Splitting(tuple(expressions), ignores_merges))


def _expressions(step: JsonValue) -> list[str] | None:
    """Return the expressions by which a step splits, or None if it does something else."""
    if not isinstance(step, dict):
        return None
    kind = step.get("type")
    if kind == "Sequence":
        steps = step.get("pretokenizers")
        parts = [_expressions(each) for each in steps] if isinstance(steps, list) else [None]
        return None if None in parts else [text for part in parts if part for text in part]
    if kind == "ByteLevel":
        if step.get("add_prefix_space"):
            return None
        return [_GPT2] if step.get("use_regex", True) else []
    if kind == "Digits":
        return [_DIGIT] if step.get("individual_digits") else None
    if kind == "Split" and step.get("behavior") in ("Isolated", "isolated"):
        pattern = step.get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, dict) else None
        return [expression] if isinstance(expression, str) and not step.get("invert") else None
    return None
