"""Attention for packed rows: each sample attends only to itself, and nothing is computed between
samples.

With position_ids alone, transformers masks the full row, so the cost grows with the square of the
row's length. Here it grows with the square of each sample's length, and no mask is built. On GPUs,
a fused kernel computes all samples in one call
(:mod:`paceline.models.kernels.attention_choice`). Elsewhere, samples of equal length are computed
in one call of scaled_dot_product_attention.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.devices import gpu_capability
from paceline.models.json_config import first_number
from paceline.models.kernels.attention_choice import (
    SDPA,
    VARLEN,
    AttentionSetup,
    fused_kernel,
    installed_packages,
)
from paceline.models.kernels.fused_attention import (
    SampleEnds,
    States,
    fused_attention,
    usable_kernel,
)
from paceline.models.transforms.compile import outside_graphs

NAME = "paceline_packed"
#: Name of :func:`paceline.models.context.attention.context_attention`.
CONTEXT_NAME = "paceline_context"
#: Attribute of a model with one of these: the name of the attention it had before.
_BEFORE = "_attention_before_packing"
#: Names of the dropout rate of attention weights in configs of transformers.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attn_dropout")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segment_lengths: tuple[int, ...] | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kernel: str = SDPA,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention within each segment of a row, as an attention function of
    transformers.

    Args:
        query: queries [1, heads, tokens, head_size]; key, value: [1, key_value_heads, tokens,
            head_size].
        attention_mask: must be None.
        segment_lengths: number of tokens of each sample, in order; their sum is ``tokens``.
        cu_seqlens: their cumulative sum, int32 [samples + 1], on the device of the queries.
        max_seqlen: the longest of them.
        sliding_window: number of tokens that a token attends to, including itself.
        kernel: name of the fused kernel. It is not used for tensors that it does not support, such
            as float32 outside of autocast.

    Returns:
        ([1, tokens, heads, head_size], None).

    Raises:
        NotImplementedError: the model requires an unsupported feature (a mask, soft-capped logits,
            sinks); the caller then uses the model's own attention.
    """
    fused = usable_kernel(kernel, query, value, dropout)
    features = {name: kwargs.get(name) for name in ("s_aux", "position_bias")}
    if fused is None or not fused.has_softcap:
        features["softcap"] = softcap
    used = [name for name, feature in features.items() if feature is not None]
    if segment_lengths is None or attention_mask is not None or used or query.shape[0] != 1:
        raise NotImplementedError(
            "packed attention requires segment lengths, and supports neither a mask nor"
            f" {', '.join(features)}"
        )
    if fused is None or cu_seqlens is None or max_seqlen is None:
        states = (query, key, value)
        result = _by_length(module, states, segment_lengths, dropout, scaling, sliding_window)
        return result, None
    ends = SampleEnds(cu_seqlens, max_seqlen)
    states = (query, key, value)
    return fused_attention(
        kernel, states, ends, ends, scaling, dropout, sliding_window, softcap
    ), None


def _by_length(
    module: torch.nn.Module,
    states: States,
    lengths: tuple[int, ...],
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """Compute attention with one call for all samples of the same length. Return [1, tokens, heads,
    head_size]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(length: int, states: Sequence[torch.Tensor]) -> torch.Tensor:
        query, key, value = states
        window = _window_mask(length, sliding_window, query.device)
        output, _ = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            window,
            dropout=dropout,
            scaling=scaling,
            is_causal=window is None,
        )
        return output

    count = len(lengths)
    # With dropout, each sample is computed alone, so that its dropout mask does not depend on the
    # lengths of the others.
    if len(set(lengths)) == 1 and (count == 1 or not dropout):
        rows = [tensor.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1) for tensor in states]
        return attend(lengths[0], rows).flatten(0, 1).unsqueeze(0)
    groups: dict[int, list[int]] = {}
    for number, length in enumerate(lengths):
        groups.setdefault(number if dropout else length, []).append(number)
    parts = [tensor.split(lengths, dim=2) for tensor in states]
    outputs: dict[int, torch.Tensor] = {}
    for numbers in groups.values():
        if len(numbers) == 1:
            rows = [part[numbers[0]] for part in parts]
        else:
            rows = [torch.cat([part[number] for number in numbers]) for part in parts]
        results = attend(lengths[numbers[0]], rows).split(1)
        outputs.update(zip(numbers, results, strict=True))
    return torch.cat([outputs[number] for number in range(count)], dim=1)


def _window_mask(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return a boolean mask [1, 1, length, length] that is True where a token attends, or None if
    plain causal attention is equivalent."""
    if window is None or length <= window:
        return None
    distance = torch.arange(length, device=device).unsqueeze(1) - torch.arange(
        length, device=device
    )
    return ((distance >= 0) & (distance < window)).view(1, 1, length, length)


def attention_of(model: Any) -> str | None:
    """Return the name of the attention implementation of a transformers model, in a
    vision-language model the one of its language model; None for other models."""
    config = getattr(model, "config", None)
    key = _language_config(config)
    return getattr(config if key is None else getattr(config, key), "_attn_implementation", None)


def _language_config(config: Any) -> str | None:
    """Return the name under which a config has the config of its language model, or None if there
    is none."""
    return "text_config" if "text_config" in getattr(config, "sub_configs", ()) else None


def set_attention(model: Any, name: str) -> None:
    """Set the attention of the language model. A vision tower keeps its own: its tokens attend in
    both directions."""
    key = _language_config(model.config)
    model.set_attn_implementation(name if key is None else {key: name})


def kernel_of(model: Any) -> str | None:
    """Return the name of the attention of a transformers model; with :func:`packed_attention`, the
    name of its kernel."""
    name = attention_of(model)
    if name != NAME:
        return name
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    packed: Any = ALL_ATTENTION_FUNCTIONS[NAME]
    return str(packed.keywords["kernel"])


def install(model: Any, kernel: str = SDPA) -> str | None:
    """Switch a transformers model to :func:`packed_attention`.

    Args:
        kernel: the kernel; with :data:`SDPA` and :data:`VARLEN`, only models that use torch's
            scaled_dot_product_attention are switched, because others need features that these
            kernels do not have.

    Returns:
        The name of the attention it used before, or None if nothing was changed.
    """
    from transformers import AttentionInterface

    before = attention_of(model)
    replaceable = (SDPA,) if kernel in (SDPA, VARLEN) else (SDPA, "eager")
    if before not in replaceable or not hasattr(model, "set_attn_implementation"):
        return None
    attention = outside_graphs(model, packed_attention)
    AttentionInterface.register(NAME, partial(attention, kernel=kernel))
    return before if replace_attention(model, NAME) else None


def replace_attention(model: Any, name: str) -> bool:
    """Switch a transformers model to one of Paceline's attention functions, which is registered,
    and note the model's own attention. Return False if its attention cannot be replaced."""
    before = attention_of(model)
    if before is None or not hasattr(model, "set_attn_implementation"):
        return False
    set_attention(model, name)
    if attention_of(model) != name:  # older code of a model
        return False
    if before not in (NAME, CONTEXT_NAME):
        setattr(model, _BEFORE, before)
    return True


def is_replaceable(model: Any) -> bool:
    """Return whether the attention of a model can be replaced by Paceline's."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attention_of(model) in (NAME, CONTEXT_NAME):
        return True
    if NAME not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(NAME, packed_attention)
    if not replace_attention(model, NAME):
        return False
    uninstall(model)
    return True


def uninstall(model: Any) -> None:
    """Give a model its own attention back."""
    set_attention(model, getattr(model, _BEFORE))


@contextmanager
def wrapped(wrapper: Callable[..., tuple[torch.Tensor, None]]) -> Iterator[None]:
    """Replace the attention for packed rows, which must be installed, within the block.

    Args:
        wrapper: function that is called with the attention, followed by its arguments.
    """
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    installed = ALL_ATTENTION_FUNCTIONS[NAME]
    AttentionInterface.register(NAME, partial(wrapper, installed))
    try:
        yield
    finally:
        AttentionInterface.register(NAME, installed)


@contextmanager
def without_packing(model: Any) -> Iterator[None]:
    """Replace the attention for packed rows within the block, because it does not support a KV
    cache."""
    name = attention_of(model)
    if name not in (NAME, CONTEXT_NAME):
        yield
        return
    uninstall(model)
    try:
        yield
    finally:
        set_attention(model, str(name))


# -- padded rows

#: ``has_padding``: whether the rows of this thread's forward pass are padded, if it is known.
_rows = threading.local()


@contextmanager
def known_padding(mask: torch.Tensor | None, num_tokens: int) -> Iterator[None]:
    """Tell torch's attention of transformers models whether rows are padded. It would read this
    from the mask in each forward pass, for which the host waits for the device.

    Args:
        mask: attention mask [rows, tokens], or None if there is none.
        num_tokens: number of tokens without padding.
    """
    if mask is None or mask.device.type == "cpu":
        yield
        return
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(SDPA, _sdpa_mask)
    _rows.has_padding = num_tokens < mask.numel()
    try:
        yield
    finally:
        _rows.has_padding = None


def _sdpa_mask(*, attention_mask: torch.Tensor | None = None, **inputs: Any) -> Any:
    """Return the result of transformers' function without its reading of the mask."""
    from transformers.masking_utils import sdpa_mask

    has_padding = getattr(_rows, "has_padding", None)
    if has_padding:
        inputs["allow_is_causal_skip"] = False
    elif has_padding is False:
        attention_mask = None
    return sdpa_mask(attention_mask=attention_mask, **inputs)


# -- the choice of a kernel


def attention_setup(config: Config, model: Any, device_type: str) -> AttentionSetup:
    """Return what the choice of a kernel depends on, for a transformers model in this process."""
    fields = model.config.get_text_config().to_dict()
    number = partial(first_number, fields)
    heads = number("num_attention_heads", "n_head", "n_heads")
    hidden = number("hidden_size", "n_embd", "d_model")
    head_size = number("qk_head_dim", "head_dim")
    if head_size is None and heads and hidden:
        head_size = hidden // heads
    installed = installed_packages()
    if device_type == "cuda" and has_varlen():
        installed |= {VARLEN}
    return AttentionSetup(
        device_type,
        config.train_args.mixed_dtype or "float32",
        gpu_capability(device_type, 1),
        installed,
        head_size,
        any(isinstance(fields.get(name), float) and fields[name] > 0 for name in _DROPOUTS),
    )


@cache
def has_varlen() -> bool:
    """Return whether this build of torch has :func:`varlen_attn` with grouped keys and values, and
    with a window."""
    from torch.nn.attention import varlen

    arguments = inspect.signature(varlen.varlen_attn).parameters
    return (
        {"enable_gqa", "window_size"} <= arguments.keys()
        and torch.backends.cuda.is_flash_attention_available()
        and not torch.version.hip
    )


def own_attention(config: Config) -> dict[str, str]:
    """Return the argument with which transformers loads a model. Flash attention, which needs the
    model on a GPU, is installed later."""
    requested = config.train_args.attn_implementation
    if requested == "auto" or fused_kernel(requested):
        return {}
    return {"attn_implementation": requested}


def install_requested(model: Any, config: Config) -> None:
    """Give a model that does not use :func:`packed_attention` the flash attention that the config
    requests, for padded rows."""
    requested = config.train_args.attn_implementation
    if fused_kernel(requested) and attention_of(model) != NAME:
        try:
            model.set_attn_implementation(requested)
        except (ValueError, ImportError) as error:
            raise unsupported_attention(config) from error


def check_model_attention(config: Config, model: Any) -> None:
    """Raise ConfigError if a model does not have the requested attention."""
    requested = config.train_args.attn_implementation
    if requested == "auto":
        return
    if fused_kernel(requested):
        is_supported = bool(getattr(model, "_supports_flash_attn", False))
    else:
        is_supported = attention_of(model) == requested
    if not is_supported:
        raise unsupported_attention(config)


def unsupported_attention(config: Config) -> ConfigError:
    return ConfigError(
        "`train_args.attn_implementation: {attn_implementation}` is not supported with `model:"
        " {model}`",
        code="attention-not-supported",
        allowed="auto, eager, and what transformers supports for this model",
        fix="set `train_args.attn_implementation: auto`",
        attn_implementation=config.train_args.attn_implementation,
        model=config.model,
    )
