"""Convert the tokenizer of first-generation Qwen models (``qwen.tiktoken``) to a fast tokenizer
with the ChatML template, so that its remote code is not needed.

The file lists byte strings in base64 with their ranks. Pairs are merged in the order of the ranks,
which determines the merges of a byte-pair tokenizer. Pre-tokenization, normalization and special
tokens are as in tokenization_qwen.py in https://huggingface.co/Qwen/Qwen-7B.
"""

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir
from paceline.data.cache import build_once, fingerprint, key_of

RANKS_FILE = "qwen.tiktoken"
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
#: The pre-tokenization pattern of Qwen2's tokenizer.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NUM_EXTRAS = 205
_LAYOUT = 1
#: ChatML with the default system prompt of Qwen-7B-Chat.
CHATML_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{%- if loop.first and message.role != 'system' %}\n"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}\n"
    "{%- endif %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' }}\n"
    "{%- if message.role == 'assistant' %}\n"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n"
    "{%- else %}\n"
    "{{- message.content + '<|im_end|>' }}\n"
    "{%- endif %}\n"
    "{{- '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}\n"
    "{{- '<|im_start|>assistant\\n' }}\n"
    "{%- endif %}"
)


def is_qwen_tokenizer(folder: Path) -> bool:
    """Return whether the folder has the original tokenizer file and no tokenizer.json, which needs
    no remote code."""
    return (folder / RANKS_FILE).is_file() and not (folder / "tokenizer.json").is_file()


def converted_tokenizer(folder: Path) -> Path:
    """Return a folder in the cache with the converted tokenizer of ``folder``, made on first use.

    Raises:
        ConfigError: the file is corrupt.
    """
    key = key_of(
        ["qwen tokenizer", _LAYOUT, fingerprint(folder / RANKS_FILE), folder_template(folder)]
    )
    final = cache_dir() / "tokenizers" / f"qwen-{key}"

    def build(staging: Path) -> None:
        write_qwen_tokenizer(folder, staging)
        # AutoTokenizer selects the class by the model type.
        (staging / "config.json").write_text(json.dumps({"model_type": "qwen2"}), encoding="utf-8")

    build_once(final, "config.json", build)
    return final


def write_qwen_tokenizer(source: Path, target: Path) -> dict[str, int]:
    """Write tokenizer.json and tokenizer_config.json to ``target``. Return the ids of the special
    tokens.

    Raises:
        ConfigError: ``source`` has no qwen.tiktoken, or it is corrupt.
    """
    from tokenizers import models

    ranks = read_ranks(source / RANKS_FILE)
    letters = _byte_letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(text(left), text(right)) for left, right in recover_merges(ranks, source)]
    vocabulary = {text(token): rank for token, rank in ranks.items()}
    tokenizer = make_qwen2_tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    extras = (f"<|extra_{number}|>" for number in range(_NUM_EXTRAS))
    special = [END_OF_TEXT, TURN_START, TURN_END, *extras]
    tokenizer.add_special_tokens(make_special_tokens(special))
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": folder_template(source) or CHATML_TEMPLATE,
    }
    (target / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1, ensure_ascii=False), encoding="utf-8"
    )
    return {token: len(ranks) + number for number, token in enumerate(special)}


def make_qwen2_tokenizer(model: Any) -> Any:
    """Return a tokenizer that splits texts and joins tokens as Qwen2's.

    Args:
        model: byte-pair model of the package tokenizers.
    """
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    tokenizer: Any = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_special_tokens(texts: Iterable[str]) -> list[Any]:
    """Return the texts as special tokens of the package tokenizers."""
    from tokenizers import AddedToken

    return [AddedToken(text, special=True, normalized=False) for text in texts]


def read_ranks(file: Path) -> dict[bytes, int]:
    """Return the rank of each byte string.

    Raises:
        ConfigError: the file does not exist, or is not a list of all single bytes and their merges.
    """
    ranks: dict[bytes, int] = {}
    try:
        for line in file.read_bytes().splitlines():
            if line.strip():
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
        if sorted(ranks.values()) != list(range(len(ranks))):
            raise ValueError("the ranks are not 0, 1, 2 …")
        if any(bytes([byte]) not in ranks for byte in range(256)):
            raise ValueError("a single byte has no rank")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            "the tokenizer {file} cannot be read: {reason}",
            code="tokenizer-unreadable",
            allowed="the qwen.tiktoken of the original repository",
            fix="copy the file again, or select another tokenizer with `tokenizer: ...`",
            file=file,
            reason=reason,
        ) from error
    return ranks


def recover_merges(ranks: dict[bytes, int], source: Path) -> list[tuple[bytes, bytes]]:
    """Return the two parts that each longer token is merged from, in the order of the ranks.

    Raises:
        ConfigError: a token is not the concatenation of two tokens of lower rank.
    """
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = merge_below(token, ranks, rank)
        if len(parts) != 2:
            raise ConfigError(
                "the tokenizer {source} is corrupt: its token {token} is not the concatenation of"
                " two other tokens",
                code="tokenizer-corrupt",
                fix="copy the file again",
                source=source / RANKS_FILE,
                token=f"{token!r}",
            )
        merges.append((parts[0], parts[1]))
    return merges


def merge_below(text: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Return the tokens of ``text``: repeatedly merge the pair with the lowest rank, as long as it
    is below ``limit``."""
    parts = [bytes([byte]) for byte in text]
    while len(parts) > 1:
        best, at = limit, -1
        for index in range(len(parts) - 1):
            rank = ranks.get(parts[index] + parts[index + 1], limit)
            if rank < best:
                best, at = rank, index
        if at < 0:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _byte_letters() -> dict[int, str]:
    """Return the printable letter of each byte in byte-level tokenizers (Radford et al., GPT-2,
    2019)."""
    plain = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    letters = {byte: chr(byte) for byte in plain}
    others = [byte for byte in range(256) if byte not in letters]
    return letters | {byte: chr(256 + number) for number, byte in enumerate(others)}


def folder_template(folder: Path) -> str | None:
    """Return the chat template in a folder, or None."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    try:
        settings: Any = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    template = settings.get("chat_template") if isinstance(settings, dict) else None
    return template if isinstance(template, str) else None
