"""Check that the ranks of a context group can divide the rows of a model, before they exist."""

from typing import Any

import torch
from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.data.collate import segment_inputs
from paceline.distributed.mesh import ParallelDims
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.models.kernels import mixers
from paceline.models.shape.trace import TRACE_ERRORS, runs_on_its_device

#: Ends of the class names of layers with a state that have no convolution.
_RECURRENT = ("RecurrentBlock", "RwkvSelfAttention", "LightningAttention", "xLSTMLayer")


def check_context_model(model: Any, config: Config, dims: ParallelDims) -> None:
    """Check a model, which may be on the meta device.

    Raises:
        ConfigError: it has layers that need whole rows.
    """
    if dims.context == 1:
        return
    base = base_model(model)
    recurrent = mixers.find_mixers(base)
    if recurrent:
        kinds = ", ".join(sorted({type(mixer).__name__ for mixer in recurrent}))
        raise unsupported_model(config, dims, _state_reason(kinds))
    others = sorted({type(layer).__name__ for layer in base.modules() if _passes_a_state(layer)})
    if others:
        raise unsupported_model(config, dims, _state_reason(", ".join(others)))
    if getattr(base.config.get_text_config(), "attention_chunk_size", None):
        reason = UserText("it computes attention in chunks of a row", code="attention-in-chunks")
        raise unsupported_model(config, dims, reason)
    if not attention.is_replaceable(base):
        reason = UserText("its attention cannot be replaced", code="attention-not-replaceable")
        raise unsupported_model(config, dims, reason)
    if next(base.parameters()).is_meta and not _passes_lengths(base):
        reason = UserText(
            "its layers do not pass the lengths of samples on to their attention",
            code="context-lengths-not-passed",
        )
        raise unsupported_model(config, dims, reason)


def _state_reason(kinds: str) -> UserText:
    return UserText(
        "{kinds} passes a state from each token to the next", code="context-mixers", kinds=kinds
    )


def _passes_a_state(layer: nn.Module) -> bool:
    """Return whether a layer, other than those for which Paceline packs rows, is recurrent: it has
    a causal convolution over tokens, or the name of a layer with a state."""
    if type(layer).__name__.endswith(_RECURRENT):
        return True
    return any(
        isinstance(child, nn.Conv1d)
        and child.kernel_size[0] > 1
        and child.groups == child.in_channels
        and child.padding == (child.kernel_size[0] - 1,)
        for child in layer.children()
    )


def _passes_lengths(model: Any) -> bool:
    """Return whether each call of the attention of a model on the meta device gets the lengths of
    the samples of a row. A model that cannot run there passes; the ranks check it again."""
    from transformers import AttentionInterface

    lengths = (3, 2)
    has_lengths: list[bool] = []

    def attend(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        *args: Any, segment_lengths: tuple[int, ...] | None = None, **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        has_lengths.append(segment_lengths == lengths)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None

    AttentionInterface.register(attention.CONTEXT_NAME, attend)
    if not attention.replace_attention(model, attention.CONTEXT_NAME):
        return True
    tokens = torch.zeros(1, sum(lengths), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), runs_on_its_device(model):
            model(
                input_ids=tokens,
                position_ids=tokens,
                use_cache=False,
                **segment_inputs(lengths, torch.device("meta")),
            )
    except TRACE_ERRORS:
        pass
    finally:
        attention.uninstall(model)
    return all(has_lengths)


def unsupported_model(config: Config, dims: ParallelDims, reason: UserText) -> ConfigError:
    """Return the error for a model whose rows cannot be divided."""
    return ConfigError(
        "`parallel.context: {size}` is not supported with `model: {model}`: {reason}",
        code="context-model",
        fix="leave `parallel.context` out; for long samples, set `parallel.tensor` with"
        " `parallel.sequence_parallel: true`, or `train_args.gradient_checkpointing: full`",
        size=dims.context,
        model=config.model,
        reason=reason,
    )
