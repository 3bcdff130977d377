"""An upper bound on the memory of a rank under ``ddp``, from files alone: no model is built, and
torch is not imported."""

import math
from itertools import pairwise
from pathlib import Path

from paceline.config.derive import average_bytes_per_element, optimizer_bytes_per_element
from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.models.builtin import resolve_model
from paceline.models.hub_configs import config_folder, read_config
from paceline.models.kinds import reads_images
from paceline.models.shape.activations import TrainedMatrices, language_activations
from paceline.models.shape.dims import LanguageDims, dims_of
from paceline.models.weights.stored_files import read_header
from paceline.planner.micro_batch import MicroBatchProfile, longest_micro_batch

#: Share of the memory below which the bound shows that a run fits. It leaves out little.
ROOMY = 0.6


def fits_roughly(
    config: Config,
    memory_bytes: int,
    batch: MicroBatchProfile | None = None,
    share: float = ROOMY,
) -> int | None:
    """Return the upper bound if it is at most a share of the memory of a rank, otherwise None."""
    bound = upper_bound(config, batch)
    return bound if bound is not None and bound <= share * memory_bytes else None


def upper_bound(config: Config, batch: MicroBatchProfile | None = None) -> int | None:
    """Return an upper bound on the bytes of state and activations of a rank with a full replica;
    None if the files do not determine one.

    Args:
        batch: lengths of a language model's samples; None: all have ``max_length`` tokens.
    """
    if reads_images(config):
        return None  # the size of the vision tower is not known before it is built
    if config.task in CAUSAL_TASKS:
        return _language(config, batch or longest_micro_batch(config))
    if config.task == "classify" and config.model.startswith("builtin:"):
        return _classifier(config)
    if config.task == "recommend":
        return _recommender(config)
    return None  # a user's task: nothing is known before its model is built


def _language(config: Config, batch: MicroBatchProfile) -> int | None:
    name = resolve_model(config.model)
    content = read_config(name)
    dims = None if content is None else dims_of(content)
    if dims is None:
        return None
    folder = config_folder(name)
    parameters = (None if folder is None else stored_parameters(folder)) or dims.parameters_at_most
    tokens = batch.fullest
    activations = language_activations(dims, config, tokens, tokens, mask_bytes=4)
    matrices = TrainedMatrices() if config.lora.enable else _largest_matrices(dims)
    return _state(config, dims, parameters) + activations.peak(matrices)


def _largest_matrices(dims: LanguageDims) -> TrainedMatrices:
    """Bound the matrices of full training whose gradients exist beside the accumulated ones. The
    copies that autocast makes of the blocks are part of :func:`_state`."""
    up = 2 * dims.feed_forward  # the gate and the up projection may be one matrix
    embedding = dims.vocabulary * dims.hidden
    return TrainedMatrices(
        largest=dims.hidden * max(up, dims.queries + 2 * dims.keys, _widest(dims)),
        largest_fused=dims.hidden * up * dims.experts if dims.experts > 1 else 0,
        head=embedding,
        tied=embedding if dims.tied else 0,
    )


def _widest(dims: LanguageDims) -> int:
    """Return the largest output width of a linear layer of attention."""
    return max(
        output for kind in dims.attention_kinds for _, output in kind.attention_linears.values()
    )


def _state(config: Config, dims: LanguageDims, parameters: int) -> int:
    args, lora = config.train_args, config.lora
    weight_bytes = 2 if args.weight_dtype == "bfloat16" else 4
    each = 2 * weight_bytes + optimizer_bytes_per_element(args) + (2 if args.mixed_dtype else 0)
    each += average_bytes_per_element(args)
    if not lora.enable:
        return parameters * each
    # inputs and outputs of the attention projections
    widths = max(sum(map(sum, kind.attention_linears.values())) for kind in dims.attention_kinds)
    widths += 3 * (dims.hidden + dims.feed_forward) * dims.experts
    adapters = (lora.rank + lora.use_dora) * widths * dims.layers
    each += 4 if lora.subtracts_adapter else 0  # the initial matrices
    saved = len(lora.modules_to_save) * dims.vocabulary * dims.hidden
    return parameters * (2 if args.mixed_dtype else 4) + (adapters + saved) * each


def _classifier(config: Config) -> int:
    """Bound the built-in image models: the weights of three 3 × 3 convolutions or of two layers
    over the pixels, and six maps per convolution."""
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
    """Bound click models whose table sizes the config gives: tables, two networks, and six times
    the rows of a batch."""
    from paceline.data.clicks.log import BUILTIN_TABLES

    settings = config.recommend
    if config.sources()[0].path.startswith("builtin:"):
        sizes = list(BUILTIN_TABLES)
    elif isinstance(settings.table_size, int) or settings.id_mapping == "hash":
        sizes_by_name = settings.table_size if isinstance(settings.table_size, dict) else {}
        default_size = settings.table_size if isinstance(settings.table_size, int) else 100_000
        sizes = [sizes_by_name.get(name, default_size) for name in settings.sparse_features]
    else:
        return None  # the table sizes depend on the data
    vectors = len(sizes) + 1
    widths = [
        max(len(settings.dense_features), 16),
        *settings.bottom_mlp,
        vectors * (vectors + settings.embedding_dim),
        *settings.top_mlp,
        1,
    ]
    parameters = settings.embedding_dim * sum(sizes) + sum(a * b + b for a, b in pairwise(widths))
    batch = (
        config.train_args.per_device_train_batch_size
        * (sum(widths) + vectors * settings.embedding_dim)
        * 4
        * 6
    )
    return parameters * 18 + batch


def stored_parameters(folder: Path) -> int | None:
    """Count the numbers in a folder's safetensors files by their headers; None without such files,
    or if one cannot be read."""
    total = 0
    try:
        for file in folder.glob("model*.safetensors"):
            for tensor in read_header(file)[0].values():
                total += math.prod(int(length) for length in tensor["shape"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return total or None
