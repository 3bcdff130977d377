"""Find tokenizers in a folder or on the hub, and load them without transformers if possible."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from pydantic import JsonValue

from paceline.core.errors import ConfigError, first_line
from paceline.core.hub import go_offline_if_unreachable, is_hub_id
from paceline.data.cache import fingerprint
from paceline.data.sources.opening import windows_fix, with_slashes
from paceline.data.text.qwen_tokenizer import QWEN2_PATTERN, converted_tokenizer, is_qwen_tokenizer

_PATTERNS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.tiktoken", "chat_template*", "additional_chat_templates/*", "tokenization_*.py",
)  # fmt: skip
_HUB_TIMEOUT_S = 10.0
#: How tokens are written that are not text.
_CONTROL = re.compile(r"<[|｜].+[|｜]>")


@dataclass
class LoadedTokenizer:
    """The parts of a tokenizer that data preparation and generation use.

    Args:
        backend: the Rust tokenizer (``tokenizers.Tokenizer``), or None for a tokenizer written in
            Python.
        python: the transformers tokenizer if there is no backend.
        special_tokens: name to text, e.g. ``{"eos_token": "</s>"}``, for chat templates.
        chat_template: Jinja source, or None.
        eos_token_id, pad_token_id: pad falls back to eos, then 0.
        start_ids, end_ids: the special tokens that the tokenizer adds before and after a text.
    """

    backend: Any
    python: Any
    special_tokens: dict[str, str]
    chat_template: str | None
    eos_token_id: int | None
    pad_token_id: int
    vocab_size: int
    special_ids: frozenset[int] = field(default_factory=frozenset)
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()

    @property
    def control_tokens(self) -> frozenset[str]:
        """The texts of the special tokens, and of added tokens that look like them: some tokenizers
        do not declare ``<|im_end|>`` special."""
        if self.backend is not None:
            added = [token.content for token in self.backend.get_added_tokens_decoder().values()]
        else:
            added = list(self.python.get_added_vocab())
        special = filter(None, map(self.token, self.special_ids))
        return frozenset({*special, *filter(_CONTROL.fullmatch, added)})

    def missing_start(self, ids: list[int]) -> list[int]:
        """Return the special tokens to put before a text: those that the tokenizer adds, unless the
        text begins with them."""
        start = list(self.start_ids)
        return [] if ids[: len(start)] == start else start

    def missing_end(self, ids: list[int]) -> list[int]:
        """Return the special tokens to put after a text: those that the tokenizer adds and the
        end-of-text token, unless the text ends with it."""
        eos = [] if self.eos_token_id is None else [self.eos_token_id]
        if eos and ids[-1:] == eos:
            return []
        end = list(self.end_ids)
        if end and ids[-len(end) :] == end:
            end = []
        return end if end[-1:] == eos else [*end, *eos]

    def without_space_after_end(self, text: str) -> str:
        """Return a text without the white space after the end-of-text token that it ends with, so
        that the token is not added again."""
        eos, stripped = self.special_tokens.get("eos_token"), text.rstrip()
        return stripped if eos and stripped.endswith(eos) else text

    def added_once(self, ids: list[int]) -> slice:
        """Return the part of a tokenized text, with special tokens, that leaves out those which the
        tokenizer added although the text has them."""
        start, end = list(self.start_ids), list(self.end_ids)
        first, past = len(start), len(ids) - len(end)
        has_start = bool(start) and ids[first : 2 * first] == start
        has_end = bool(end) and first < past and ids[past - len(end) : past] == end
        return slice(first if has_start else 0, past if has_end else len(ids))

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids, including special tokens."""
        if self.backend is not None:
            return str(self.backend.decode(ids, skip_special_tokens=False))
        return str(self.python.decode(ids))

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text. The Rust tokenizer encodes them in parallel."""
        if self.backend is not None:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        return [
            list(self.python(text, add_special_tokens=add_special_tokens)["input_ids"])
            for text in texts
        ]

    def token(self, token_id: int) -> str | None:
        """Return the token as it is in the vocabulary, or None for an unused id."""
        if self.backend is not None:
            return cast("str | None", self.backend.id_to_token(token_id))
        return cast("str | None", self.python.convert_ids_to_tokens(token_id))


def find_tokenizer(name: str, trust_remote_code: bool = False) -> Path:
    """Return the local folder of a tokenizer: ``name``, or the downloaded files of a hub id.

    Raises:
        ConfigError: the folder does not exist or has no tokenizer, or the download failed.
    """
    folder = Path(with_slashes(name)).expanduser()
    if not folder.exists():
        return _from_hub(name, trust_remote_code)
    if not folder.is_dir():
        raise ConfigError(
            "`{name}` is a file",
            code="tokenizer-is-file",
            allowed="a folder with a tokenizer (tokenizer.json etc.)",
            name=name,
        )
    if is_qwen_tokenizer(folder):
        return converted_tokenizer(folder)
    if tokenizer_files(folder):
        return folder
    base = _adapter_base(folder)
    if base is not None and base != name:
        return find_tokenizer(base, trust_remote_code)
    names = ", ".join(sorted(path.name for path in folder.iterdir())[:6]) or "nothing"
    raise ConfigError(
        "no tokenizer in `{name}` (found: {names})",
        code="no-tokenizer",
        allowed="a folder with tokenizer.json and tokenizer_config.json, as written by"
        " save_pretrained",
        fix="set `tokenizer: ...` to the tokenizer's folder or hub id",
        name=name,
        names=names,
    )


def _adapter_base(folder: Path) -> str | None:
    try:
        base = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8")).get(
            "base_model_name_or_path"
        )
    except (OSError, ValueError, AttributeError):
        return None
    return base if isinstance(base, str) and base else None


def _from_hub(name: str, trust_remote_code: bool) -> Path:
    if not is_hub_id(name):
        raise ConfigError(
            "`{name}` does not exist",
            code="missing-tokenizer-folder",
            allowed="a folder with a tokenizer, a hub id such as Qwen/Qwen2.5-0.5B, or"
            " builtin:qwen2-tiny",
            fix=windows_fix(name) or "check the path",
            name=name,
        )
    go_offline_if_unreachable(name)
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [
        *(pattern for pattern in _PATTERNS if trust_remote_code or not pattern.endswith(".py")),
        "config.json",
        "*processor_config.json",
    ]
    try:
        revision = HfApi().model_info(name, timeout=_HUB_TIMEOUT_S).sha
        folder = Path(
            snapshot_download(
                name, revision=revision, allow_patterns=patterns, etag_timeout=_HUB_TIMEOUT_S
            )
        )
    except HFValidationError as error:
        raise _download_failed(name, error) from error
    except Exception as error:  # each client library raises network errors of its own
        try:
            folder = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except Exception:
            raise _download_failed(name, error) from error
    if not tokenizer_files(folder):
        raise ConfigError(
            "`{name}` on the hub has no tokenizer",
            code="no-tokenizer-on-hub",
            fix="select one with `tokenizer: ...`",
            name=name,
        )
    return converted_tokenizer(folder) if is_qwen_tokenizer(folder) else folder


def _download_failed(name: str, error: Exception) -> ConfigError:
    return ConfigError(
        "the tokenizer of `{name}` cannot be downloaded ({reason})",
        code="tokenizer-download-failed",
        allowed="a folder with a model or tokenizer, a hub id that this machine can reach, or"
        " builtin:qwen2-tiny",
        fix="download it on another machine and use its folder: `model=/path/to/folder`",
        name=name,
        reason=first_line(error),
    )


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer, sorted; empty if the folder has no tokenizer."""
    files = sorted(
        {file for pattern in _PATTERNS for file in folder.glob(pattern) if file.is_file()}
    )
    has_tokenizer = any(
        file.suffix != ".py" and not file.name.startswith("chat_template") for file in files
    )
    return files if has_tokenizer else []


def tokenizer_fingerprint(folder: Path) -> list[Any]:
    """Return what distinguishes this tokenizer from any other: names and hashes of its files."""
    return [[file.name, *fingerprint(file)] for file in tokenizer_files(folder)]


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> LoadedTokenizer:
    """Load the tokenizer of a local folder, with the same results as transformers' AutoTokenizer.

    Raises:
        ConfigError: the files are not a valid tokenizer.
    """
    return _load_directly(folder) or _load_by_transformers(folder, trust_remote_code)


def _load_directly(folder: Path) -> LoadedTokenizer | None:
    """Load a Qwen2 tokenizer without transformers, whose import takes seconds. Return None for
    other tokenizers: their classes may differ from their files."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_plain_qwen2 = (
        settings.get("tokenizer_class") in ("Qwen2Tokenizer", "Qwen2TokenizerFast")
        and config.get("model_type") in ("qwen2", "qwen3")
        and not settings.get("add_bos_token")
        and not settings.get("add_eos_token")
        and not settings.get("auto_map")
        and not settings.get("split_special_tokens")
        and not (folder / "additional_chat_templates").exists()
        and (folder / "tokenizer.json").is_file()
    )
    if not is_plain_qwen2:
        return None
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        steps = json.loads(backend.pre_tokenizer.__getstate__())["pretokenizers"]
        is_known = (
            len(steps) == 2
            and steps[0]["pattern"] == {"Regex": QWEN2_PATTERN}
            and not steps[1]["add_prefix_space"]
            and json.loads(backend.normalizer.__getstate__()) == {"type": "NFC"}
        )
    except Exception:  # the tokenizers library raises bare Exception; transformers reports it
        return None
    special = _special_tokens(settings)
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared = {
        str(token.get("content")) for token in settings.get("added_tokens_decoder", {}).values()
    } | set(special.values())
    if not is_known or not declared <= added:
        return None
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return _loaded(backend, None, special, template)


def _special_tokens(settings: Mapping[str, JsonValue]) -> dict[str, str]:
    # Qwen2's defaults.
    special = {
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
    }
    for key in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[key] = value
        elif key in settings:
            special.pop(key, None)
    return special


def _load_by_transformers(folder: Path, trust_remote_code: bool) -> LoadedTokenizer:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except Exception as error:  # a tokenizer's code may raise anything
        raise ConfigError(
            "the tokenizer in `{folder}` cannot be loaded: {reason}",
            code="tokenizer-not-loaded",
            fix="select another one with `tokenizer: ...`; if it requires code from the hub that"
            " you trust, set `trust_remote_code: true`",
            folder=folder,
            reason=first_line(error),
        ) from error
    special = {
        key: str(value)
        for key, value in tokenizer.special_tokens_map.items()
        if isinstance(value, str)
    }
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return _loaded(backend, tokenizer, special, tokenizer.chat_template)


def _loaded(backend: Any, python: Any, special: dict[str, str], template: Any) -> LoadedTokenizer:
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, dict):
        template = template.get("default")
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        look_up = backend.token_to_id
        size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        special_ids = {token_id for token_id, token in added.items() if token.special}
    else:
        look_up = python.convert_tokens_to_ids
        size = len(python)
        special_ids = set(python.all_special_ids)
    start, end = added_ids(backend, python)
    eos = look_up(special["eos_token"]) if "eos_token" in special else None
    pad = look_up(special["pad_token"]) if "pad_token" in special else None
    return LoadedTokenizer(
        backend=backend,
        python=None if backend is not None else python,
        special_tokens=special,
        chat_template=template,
        eos_token_id=eos,
        pad_token_id=pad if pad is not None else eos or 0,
        vocab_size=size,
        special_ids=frozenset(special_ids),
        start_ids=start,
        end_ids=end,
    )


#: Texts; every tokenizer knows at least one of them.
_PROBES = ("a", "the", "0", "一")


def added_ids(backend: Any, python: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens that a tokenizer adds before and after a text."""
    for probe in _PROBES:
        if backend is not None:
            plain, full = (
                backend.encode(probe, add_special_tokens=add).ids for add in (False, True)
            )
        else:
            plain, full = (
                list(python(probe, add_special_tokens=add)["input_ids"]) for add in (False, True)
            )
        for start in range(len(full) - len(plain) + 1):
            if plain and full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
    return (), ()
