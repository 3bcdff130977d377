"""Convert first-generation Qwen models (``model_type: qwen``: Qwen-1.8B to Qwen-72B) to Qwen2.

Their modeling code requires transformers 4. The architecture is Qwen2 with fused attention
projections and without grouped heads, so the conversion changes only names and shapes
(modeling_qwen.py in https://huggingface.co/Qwen/Qwen-7B is the reference):

- ``attn.c_attn`` is the query, key and value projections concatenated along the rows; it has a
  bias, ``attn.c_proj`` does not.
- The MLP is ``c_proj(w1(x) * silu(w2(x)))``: ``w2`` is Qwen2's gate projection and ``w1`` its up
  projection; ``intermediate_size`` is the sum of their widths.
- Dynamic NTK scaling and log-n attention have no effect up to ``seq_length`` tokens. Longer samples
  are an error.

The conversion renames and splits the tensors of one safetensors file at a time. The file is
memory-mapped.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import cache_dir, human_bytes
from paceline.core.texts import UserText
from paceline.models.json_config import JsonObject, first_number, read_object

if TYPE_CHECKING:
    import torch

MODEL_TYPE = "qwen"
#: Key that marks a converted model in its config.json, and in the config.json of models trained
#: from it.
CONVERTED_KEY = "paceline_converted_from"
_LAYOUT = 1

_LAYER = re.compile(r"transformer\.h\.(\d+)\.(.+)")
_OUTSIDE = {
    "transformer.wte.weight": "model.embed_tokens.weight",
    "transformer.ln_f.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight",
}
_IN_LAYER = {
    "ln_1.weight": "input_layernorm.weight",
    "ln_2.weight": "post_attention_layernorm.weight",
    "attn.c_proj.weight": "self_attn.o_proj.weight",
    "mlp.w1.weight": "mlp.up_proj.weight",
    "mlp.w2.weight": "mlp.gate_proj.weight",
    "mlp.c_proj.weight": "mlp.down_proj.weight",
}
#: Constants that some checkpoints contain and Qwen2 computes.
_BUFFERS = re.compile(r"transformer\.(.+\.)?(rotary_emb\.inv_freq|masked_bias|logn_tensor)")


# -- config.json
def is_qwen(content: JsonObject | None) -> bool:
    """Return whether a config.json belongs to a first-generation Qwen model."""
    return content is not None and content.get("model_type") == MODEL_TYPE


def as_qwen2_config(content: dict[str, JsonValue], name: str) -> dict[str, JsonValue]:
    """Convert the config.json of a first-generation Qwen model to Qwen2; others are returned
    unchanged.

    Raises:
        ConfigError: a first-generation model has a feature that Qwen2 lacks.
    """
    if not is_qwen(content):
        return content
    for key, expected in (
        ("no_bias", True),
        ("rotary_pct", 1.0),
        ("scale_attn_weights", True),
        ("emb_dropout_prob", 0.0),
    ):
        if content.get(key, expected) != expected:
            raise _unsupported(
                name, f"its config.json has `{key}: {content[key]}`", f"`{key}: {expected}`"
            )
    for key, what in (
        ("visual", "images"),
        ("audio", "audio"),
        ("quantization_config", "quantized weights"),
    ):
        if content.get(key):
            raise _unsupported(
                name,
                f"it has {what} (`{key}` in its config.json)",
                "the text models with unquantized weights",
            )
    hidden = _number(content, name, "hidden_size", "n_embd")
    heads = _number(content, name, "num_attention_heads", "n_head")
    head_size = first_number(content, "kv_channels") or hidden // heads
    if hidden % heads or head_size * heads != hidden:
        raise _unsupported(
            name,
            "its attention heads do not add up to `hidden_size`",
            "`kv_channels` × heads = `hidden_size`",
        )
    rope_theta = content.get("rotary_emb_base")
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": hidden,
        "num_hidden_layers": _number(content, name, "num_hidden_layers", "n_layer"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": _number(content, name, "intermediate_size", "ffn_hidden_size") // 2,
        "vocab_size": _number(content, name, "padded_vocab_size", "vocab_size"),
        "max_position_embeddings": trained_length(content, name),
        "hidden_act": "silu",
        "rms_norm_eps": content.get("layer_norm_epsilon", 1e-6),
        "rope_theta": float(rope_theta) if isinstance(rope_theta, int | float) else 10000.0,
        "attention_dropout": content.get("attn_dropout_prob", 0.0),
        "initializer_range": content.get("initializer_range", 0.02),
        "tie_word_embeddings": bool(content.get("tie_word_embeddings", False)),
        "use_sliding_window": False,
        "use_cache": True,
        CONVERTED_KEY: MODEL_TYPE,
    }


def trained_length(content: JsonObject, name: str) -> int:
    """Return the number of tokens up to which the converted model is equivalent to the original."""
    return _number(content, name, "seq_length", "n_ctx")


def check_length(config: Config, content: JsonObject | None) -> None:
    """Check that samples are not longer than those that the model was trained on. For longer ones,
    the original model changes its attention.

    Raises:
        ConfigError: ``train_args.max_length`` exceeds the model's ``seq_length``.
    """
    if not is_qwen(content):
        return
    assert content is not None
    limit, max_length = trained_length(content, config.model), config.train_args.max_length
    if max_length > limit:
        raise ConfigError(
            "`train_args.max_length: {max_length}` exceeds the {limit} tokens that {model} was"
            " trained on (`seq_length`)",
            code="too-long-for-qwen",
            allowed="at most {limit}: for longer samples the original applies dynamic NTK scaling"
            " and log-n attention, which Qwen2, to which it is converted, does not have",
            fix="set `train_args.max_length: {limit}`",
            max_length=max_length,
            limit=limit,
            model=config.model,
        )


# -- names of modules in `lora`
#: Module of the original models → modules of the converted models.
_MODULES = {
    "c_attn": ["q_proj", "k_proj", "v_proj"],
    "c_proj": ["o_proj", "down_proj"],
    "attn.c_proj": ["o_proj"],
    "mlp.c_proj": ["down_proj"],
    "w1": ["up_proj"],
    "w2": ["gate_proj"],
    "wte": ["embed_tokens"],
}


def with_qwen2_modules(config: Config) -> Config:
    """Replace module names of the original Qwen models in ``lora`` by the names in the converted
    models."""
    lora = config.lora
    targets = lora.target_modules
    if isinstance(targets, str):
        targets = _MODULES.get(targets, targets)
    else:
        targets = _translated(targets)
    update = {"target_modules": targets, "modules_to_save": _translated(lora.modules_to_save)}
    return config.model_copy(update={"lora": lora.model_copy(update=update)})


def module_notice(config: Config) -> str:
    """Return a message about the replaced module names, or an empty string if there are none."""
    targets = config.lora.target_modules
    names = [targets] if isinstance(targets, str) else targets
    replaced = [name for name in (*names, *config.lora.modules_to_save) if name in _MODULES]
    pairs = "; ".join(f"{name} is {', '.join(_MODULES[name])}" for name in dict.fromkeys(replaced))
    if not pairs:
        return ""
    return UserText(
        "lora: modules of the original Qwen model, in the Qwen2 form: {pairs}",
        code="modules-of-first-generation-qwen",
        pairs=pairs,
    )


def _translated(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(new for name in names for new in _MODULES.get(name, [name])))


def _number(content: JsonObject, name: str, *keys: str) -> int:
    value = first_number(content, *keys)
    if value is None:
        raise _unsupported(
            name,
            f"`{keys[0]}` in its config.json is missing or not a number",
            "the config.json of the original repository",
        )
    return value


def _unsupported(name: str, what: str, allowed: str) -> ConfigError:
    return ConfigError(
        "`model: {name}` is a first-generation Qwen model that cannot be converted to Qwen2:"
        " {subject}",
        code="qwen-not-convertible",
        allowed=allowed,
        fix="use the original text model, or Qwen1.5 or later, which need no conversion",
        name=name,
        subject=what,
    )


# -- weights
def check_weights(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint.

    Raises:
        ConfigError: there are no safetensors files. Pickled weights (.bin) are not supported.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if weights:
        return weights
    pickled = any(folder.glob("*.bin"))
    raise ConfigError(
        "{folder} has {detail}, but a first-generation Qwen model is converted from safetensors"
        " files",
        code="qwen-without-safetensors",
        allowed="model*.safetensors, as in the hub's current revision of the repository",
        fix="download the repository's *.safetensors files{why}",
        folder=folder,
        detail="only pickled weights (.bin)" if pickled else "no weights",
        why="; loading a pickle can run code" if pickled else "",
    )


def converted_folder(folder: Path) -> Path:
    """Return the folder of the converted model, which is created in the cache on first use.

    Raises:
        ConfigError: the checkpoint is incomplete or has unknown tensors, or the cache's disk is
            full.
    """
    from paceline.data.cache import build_once, key_of

    weights = check_weights(folder)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    key = key_of(["qwen", _LAYOUT, str(folder.resolve()), stats, content])
    final = cache_dir() / "models" / f"{folder.resolve().name}-as-qwen2-{key}"
    if not (final / "config.json").is_file():
        _check_space(final, sum(size for _, size, _ in stats))
    build_once(
        final,
        "config.json",
        lambda staging_dir: _convert(folder, weights, content, staging_dir),
    )
    return final


def _check_space(final: Path, needed: int) -> None:
    existing = next(parent for parent in final.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            "converting the model to Qwen2 writes {needed} to {parent}, where only {free} are free",
            code="no-space-for-conversion",
            fix="free space, or set XDG_CACHE_HOME to a folder on another disk",
            needed=human_bytes(needed),
            parent=final.parent,
            free=human_bytes(free),
        )


def _convert(
    source: Path, weights: list[Path], content: dict[str, JsonValue], target: Path
) -> None:
    from paceline.data.text.qwen_tokenizer import END_OF_TEXT, TURN_END, write_qwen_tokenizer

    config = as_qwen2_config(content, str(source))
    files: dict[str, str] = {}
    for number, file in enumerate(weights, start=1):
        name = f"model-{number:05}-of-{len(weights):05}.safetensors"
        files |= dict.fromkeys(_convert_file(file, target / name), name)
    num_layers = _number(config, str(source), "num_hidden_layers")
    missing = sorted(_expected_names(config, num_layers) - set(files))
    if missing:
        raise ConfigError(
            "{source} has no tensor for {missing}{detail}",
            code="qwen-missing-tensors",
            fix="copy all of its safetensors files",
            source=source,
            missing=", ".join(missing[:4]),
            detail=" …" if len(missing) > 4 else "",
        )
    total = sum((target / name).stat().st_size for name in set(files.values()))
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (target / "model.safetensors.index.json").write_text(
        json.dumps(index, indent=1), encoding="utf-8"
    )
    special = write_qwen_tokenizer(source, target)
    ends = [special[TURN_END], special[END_OF_TEXT]]
    generation = _generation_config(source) | {
        "eos_token_id": ends,
        "pad_token_id": special[END_OF_TEXT],
    }
    (target / "generation_config.json").write_text(
        json.dumps(generation, indent=1), encoding="utf-8"
    )
    (target / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def _generation_config(source: Path) -> dict[str, JsonValue]:
    """Return the settings of generation_config.json that transformers supports."""
    known = ("do_sample", "top_k", "top_p", "temperature", "repetition_penalty", "max_new_tokens")
    content = read_object(source / "generation_config.json") or {}
    return {key: content[key] for key in known if content.get(key) is not None}


def _convert_file(source: Path, target: Path) -> list[str]:
    """Copy a safetensors file with Qwen2's tensor names. Return these names."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    try:
        with safe_open(str(source), framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  (not a dictionary)
                tensors |= _renamed(name, reader.get_tensor(name), source)
            save_file(tensors, str(target), metadata={"format": "pt"})
    except SafetensorError as error:
        raise ConfigError(
            "{source} is not a complete safetensors file: {reason}",
            code="incomplete-safetensors",
            fix="copy the file again",
            source=source,
            reason=error,
        ) from error
    return list(tensors)


def _renamed(name: str, tensor: torch.Tensor, source: Path) -> dict[str, torch.Tensor]:
    """Return the Qwen2 tensors for an original tensor: none for a constant, three for the fused
    projection."""
    if _BUFFERS.fullmatch(name):
        return {}
    if name in _OUTSIDE:
        return {_OUTSIDE[name]: tensor}
    layer = _LAYER.fullmatch(name)
    part = layer.group(2) if layer else ""
    prefix = f"model.layers.{layer.group(1)}." if layer else ""
    if part in _IN_LAYER:
        return {prefix + _IN_LAYER[part]: tensor}
    shape = list(tensor.shape)
    if part in ("attn.c_attn.weight", "attn.c_attn.bias") and shape and shape[0] % 3 == 0:
        kind = part.rpartition(".")[2]
        thirds = zip("qkv", tensor.chunk(3), strict=True)
        return {f"{prefix}self_attn.{letter}_proj.{kind}": third for letter, third in thirds}
    raise ConfigError(
        "{source} has a tensor `{name}` of shape {shape} that the original Qwen models do not have",
        code="qwen-unknown-tensor",
        allowed="the tensors of modeling_qwen.py in https://huggingface.co/Qwen/Qwen-7B",
        fix="merge adapters into the weights first, and use the checkpoint of the full model",
        source=source,
        name=name,
        shape=shape,
    )


def _expected_names(config: JsonObject, num_layers: int) -> set[str]:
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        names.add("lm_head.weight")
    parts = [
        *_IN_LAYER.values(),
        *(f"self_attn.{letter}_proj.{kind}" for letter in "qkv" for kind in ("weight", "bias")),
    ]
    return names | {f"model.layers.{layer}.{part}" for layer in range(num_layers) for part in parts}
