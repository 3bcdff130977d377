"""An upper bound on what a rank under ``ddp`` takes, from files alone: no model is built and no
torch imported."""

import json
from itertools import pairwise
from pathlib import Path

from paceline.config.derive import optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder, read_config
from paceline.models.shape.activations import LanguageDims, dims_of, language_activations

#: Headers of safetensors files larger than this are not read: none is.
_HEADER_BYTES = 100 << 20


def upper_bound(config: Config) -> int | None:
    """Bytes of state and activations of one rank that holds the whole model, or more; None where
    the files do not say."""
    if config.task in ("sft", "pretrain"):
        return _language(config)
    if config.task == "classify" and config.model.startswith("builtin:"):
        return _classifier(config)
    if config.task == "recommend":
        return _recommender(config)
    return None  # a task of the user's own: its model is known when it is built


def _language(config: Config) -> int | None:
    name = resolve_model(config.model)
    content = read_config(name)
    dims = None if content is None else dims_of(content)
    if dims is None:
        return None
    folder = config_folder(name)
    parameters = (None if folder is None else stored_parameters(folder)) or dims.parameters_at_most
    args = config.train_args
    tokens = float(args.per_device_train_batch_size * args.max_length)
    kept = language_activations(dims, config, tokens, tokens, mask_bytes=4)
    return _state(config, dims, parameters) + kept.total


def _state(config: Config, dims: LanguageDims, parameters: int) -> int:
    args, lora = config.train_args, config.lora
    each = 4 + 4 + optimizer_bytes_per_element(args) + (2 if args.mixed_dtype else 0)
    if not lora.enable:
        return parameters * each
    # of the four projections of attention, inputs and outputs
    widths = 4 * dims.hidden + 2 * dims.queries + 2 * dims.keys
    widths += 3 * (dims.hidden + dims.feed_forward) * dims.experts
    adapters = lora.rank * widths * dims.layers
    saved = len(lora.modules_to_save) * dims.vocabulary * dims.hidden
    return parameters * (2 if args.mixed_dtype else 4) + (adapters + saved) * each


def _classifier(config: Config) -> int:
    """The built-in image models: weights of three 3 × 3 convolutions, or of two layers over the
    pixels; six maps a convolution."""
    hidden, pixels = config.classify.hidden_size, max(64, config.classify.image_size**2)
    parameters = (
        9 * (3 * hidden + 3 * hidden * hidden)
        + 3 * pixels * hidden
        + hidden * hidden
        + 4096 * hidden
    )
    maps = config.train_args.per_device_train_batch_size * pixels * hidden * 4 * 6
    return parameters * 18 + maps


def _recommender(config: Config) -> int | None:
    """Click models whose tables' sizes the config gives: rows, two networks, and six times what a
    batch's rows hold."""
    from paceline.data.clicks.log import BUILTIN_TABLES

    said = config.recommend
    if config.sources()[0].path.startswith("builtin:"):
        sizes = list(BUILTIN_TABLES)
    elif isinstance(said.table_size, int) or said.id_mapping == "hash":
        given = said.table_size if isinstance(said.table_size, dict) else {}
        usual = said.table_size if isinstance(said.table_size, int) else 100_000
        sizes = [given.get(name, usual) for name in said.sparse_features]
    else:
        return None  # the data say how large the tables are
    vectors = len(sizes) + 1
    widths = [
        max(len(said.dense_features), 16),
        *said.bottom_mlp,
        vectors * (vectors + said.embedding_dim),
        *said.top_mlp,
        1,
    ]
    parameters = said.embedding_dim * sum(sizes) + sum(a * b + b for a, b in pairwise(widths))
    batch = (
        config.train_args.per_device_train_batch_size
        * (sum(widths) + vectors * said.embedding_dim)
        * 4
        * 6
    )
    return parameters * 18 + batch


def stored_parameters(folder: Path) -> int | None:
    """Numbers in a folder's safetensors files, by their headers; None without such files, or with
    one that cannot be read."""
    files = sorted(folder.glob("model*.safetensors"))
    total = 0
    try:
        for file in files:
            with open(file, "rb") as handle:
                size = int.from_bytes(handle.read(8), "little")
                if not 0 < size <= _HEADER_BYTES:
                    return None
                header = json.loads(handle.read(size))
            for name, one in header.items():
                if name != "__metadata__":
                    count = 1
                    for length in one["shape"]:
                        count *= int(length)
                    total += count
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return total or None
