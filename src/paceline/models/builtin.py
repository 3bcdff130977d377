"""The built-in models: small Qwen2-style language models with random weights, which need no
download.

Each is written to the cache as a Hugging Face folder, so that other code does not need to
distinguish built-in models. Configuration, weights and tokenizer are written without importing the
modeling code, which takes seconds.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from paceline.core.errors import ConfigError, unknown_name
from paceline.core.files import cache_dir
from paceline.data.cache import build_once
from paceline.data.sources.builtin import builtin_dataset, python_version
from paceline.data.sources.hub import MODELSCOPE_PREFIX, download_from_modelscope
from paceline.data.sources.opening import with_slashes
from paceline.data.text.qwen_tokenizer import (
    END_OF_TEXT,
    TURN_END,
    TURN_START,
    make_qwen2_tokenizer,
    make_special_tokens,
)
from paceline.models.hub_configs import canonical_id, read_config

if TYPE_CHECKING:
    import numpy as np

_LAYOUT = 4
_SEED = 20
_INIT_STD = 0.02
VOCAB_SIZE = 8192
CHAT_TEMPLATE = (
    "{%- if tools %}\n{{- '<|im_start|>system\\n' }}\n{%- if messages[0].role == 'system' %}\n{{-"
    " messages[0].content + '\\n\\n' }}\n{%- set messages = messages[1:] %}\n{%- endif %}\n{{- 'You"
    " can call these functions:\\n' }}\n{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%-"
    ' endfor %}\n{{- \'To call one, write <tool_call>{"name": "...", "arguments":'
    " {...}}</tool_call>.<|im_end|>\\n' }}\n{%- endif %}\n{%- for message in messages %}\n{{-"
    " '<|im_start|>' + message.role + '\\n' }}\n{%- if message.role == 'assistant' %}\n{%-"
    " generation %}\n{%- if 'reasoning_content' in message and message.reasoning_content %}\n{{-"
    " '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}\n{%- endif %}\n{%- if"
    " 'tool_calls' in message and message.tool_calls %}\n{{- message.content or '' }}\n{%- for call"
    " in message.tool_calls %}\n{%- if message.content or not loop.first %}{{- '\\n' }}{%- endif"
    " %}\n{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} |"
    " tojson) + '</tool_call>' }}\n{%- endfor %}\n{{- '<|im_end|>' }}\n{%- else %}\n{{-"
    " message.content + '<|im_end|>' }}\n{%- endif %}\n{%- endgeneration %}\n{%- else %}\n{{-"
    " message.content + '<|im_end|>' }}\n{%- endif %}\n{{- '\\n' }}\n{%- endfor %}\n{%- if"
    " add_generation_prompt %}\n{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
)


@dataclass(frozen=True)
class _BuiltinShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    positions: int


_SHAPES = {
    "qwen2-tiny": _BuiltinShape(
        hidden=256, layers=8, heads=8, kv_heads=4, intermediate=832, positions=2048
    ),
    "qwen2-micro": _BuiltinShape(
        hidden=64, layers=2, heads=4, kv_heads=2, intermediate=192, positions=2048
    ),
}


def resolve_model(name: str) -> str:
    """Resolve the name of a model to a folder or a hub ID.

    ``builtin:NAME`` becomes the folder of the model, which is created on first use;
    ``modelscope:OWNER/NAME`` becomes the folder to which it is downloaded; a well-known hub ID gets
    the hub's spelling; a path of Windows becomes one of this system if that exists. Any other name
    is returned unchanged.

    The folder of a built-in model has ``config.json``, ``model.safetensors`` (float32),
    ``tokenizer.json``, ``tokenizer_config.json`` with the chat template, and
    ``generation_config.json``.

    Raises:
        ConfigError: the built-in model does not exist.
    """
    if name.startswith(MODELSCOPE_PREFIX):
        return download_from_modelscope(name, "model")
    if not name.startswith("builtin:"):
        return canonical_id(with_slashes(name))
    short = name.removeprefix("builtin:")
    if short not in _SHAPES:
        known = [f"builtin:{shape}" for shape in _SHAPES]
        raise unknown_name("built-in language model", name, known)
    folder = cache_dir() / "models" / f"{short}-{python_version()}-v{_LAYOUT}"
    build_once(folder, "config.json", lambda staging_dir: _write_model(staging_dir, _SHAPES[short]))
    return str(folder)


def _write_model(folder: Path, shape: _BuiltinShape) -> None:
    from safetensors.numpy import save_file

    tokenizer = builtin_tokenizer()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    ids = {"eos_token_id": 2, "pad_token_id": 0}
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False},
    )
    save_file(dict(_weights(shape)), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": shape.hidden,
            "intermediate_size": shape.intermediate,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "max_position_embeddings": shape.positions,
            "hidden_act": "silu",
            "initializer_range": _INIT_STD,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_cache": True,
            "use_sliding_window": False,
            "dtype": "float32",
            **ids,
        },
    )


def _weights(shape: _BuiltinShape) -> Iterator[tuple[str, np.ndarray]]:
    import numpy as np

    hidden, kv = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    yield "model.embed_tokens.weight", _normal("model.embed_tokens.weight", (VOCAB_SIZE, hidden))
    yield "model.norm.weight", np.ones(hidden, np.float32)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", np.ones(hidden, np.float32)
        for name, size in (("q", hidden), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.bias", np.zeros(size, np.float32)
        for name, rows, columns in (
            ("self_attn.q_proj", hidden, hidden),
            ("self_attn.k_proj", kv, hidden),
            ("self_attn.v_proj", kv, hidden),
            ("self_attn.o_proj", hidden, hidden),
            ("mlp.gate_proj", shape.intermediate, hidden),
            ("mlp.up_proj", shape.intermediate, hidden),
            ("mlp.down_proj", hidden, shape.intermediate),
        ):
            weight = f"{prefix}{name}.weight"
            yield weight, _normal(weight, (rows, columns))


def _normal(name: str, size: tuple[int, int]) -> np.ndarray:
    """Return approximately normal float32 values [rows, columns] with standard deviation 0.02,
    identical bit for bit on every machine.

    Each is a sum of four uniform 16-bit integers (Irwin-Hall distribution). numpy's normal
    distribution uses the C library's logarithm, whose last bit differs between platforms.
    """
    import numpy as np

    count = size[0] * size[1]
    raw = np.random.PCG64([_SEED, zlib.crc32(name.encode())]).random_raw(count)
    halves = raw.astype("<u8").view("<u2").reshape(count, 4)
    total = halves.sum(axis=1, dtype=np.int64) - 4 * 65535 // 2
    std = 65536 / 3**0.5  # of a sum of four uniform 16-bit integers
    weights: np.ndarray = (total.astype(np.float64) * (_INIT_STD / std)).astype(np.float32)
    return weights.reshape(size)


def builtin_tokenizer() -> Path:
    """Return the folder of the built-in models' tokenizer, which is trained on the built-in
    datasets on first use."""
    folder = cache_dir() / "models" / f"tokenizer-{python_version()}-v{_LAYOUT}"
    build_once(folder, "tokenizer_config.json", _write_tokenizer)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import models, pre_tokenizers, trainers

    # The same pipeline as in Qwen2, because transformers builds it for every qwen2 model.
    tokenizer = make_qwen2_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=make_special_tokens((END_OF_TEXT, TURN_START, TURN_END)),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "unk_token": END_OF_TEXT,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _training_text() -> Iterator[str]:
    for row in _rows("python-docs"):
        yield from (f"{message['role']}\n{message['content']}" for message in row["messages"])
    for number, row in enumerate(_rows("python-source")):
        if number % 3 == 0:  # a third of the code is enough for the tokenizer
            yield row["text"]


def _rows(dataset: str) -> Iterator[Any]:
    with open(builtin_dataset(dataset), encoding="utf-8") as handle:
        for line in handle:
            yield json.loads(line)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def config_numbers(name: str) -> dict[str, JsonValue]:
    """Return the ``config.json`` of a local folder or a well-known hub ID without importing
    libraries, or an empty dict if it cannot be read."""
    try:
        return read_config(resolve_model(name)) or {}
    except ConfigError:  # reported by the task's own check
        return {}


def model_type(name: str) -> str | None:
    """Return the ``model_type`` of a local folder or a well-known hub ID, or None if it cannot be
    read."""
    kind = config_numbers(name).get("model_type")
    return kind if isinstance(kind, str) and kind.isidentifier() else None
