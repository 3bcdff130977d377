"""Check that the ranks of a context group can divide the rows of a model, before they exist."""

from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.distributed.mesh import ParallelDims
from paceline.models import attention
from paceline.models.blocks import base_model
from paceline.models.kernels import mixers


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
        reason = UserText(
            "{kinds} passes a state from each token to the next", code="context-mixers", kinds=kinds
        )
        raise unsupported_model(config, dims, reason)
    if getattr(base.config.get_text_config(), "attention_chunk_size", None):
        reason = UserText("it computes attention in chunks of a row", code="attention-in-chunks")
        raise unsupported_model(config, dims, reason)
    if not attention.is_replaceable(base):
        reason = UserText("its attention cannot be replaced", code="attention-not-replaceable")
        raise unsupported_model(config, dims, reason)


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
