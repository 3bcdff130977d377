"""Divide the attention of a model among the ranks of a context group."""

from typing import Any

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.texts import UserText
from paceline.models import attention
from paceline.models.context.attention import install_context
from paceline.models.context.choice import ContextMethod, method_of_run
from paceline.models.context.model_check import check_context_model, unsupported_model
from paceline.models.context.place import ContextPlace
from paceline.models.kernels.attention_choice import SDPA


def divide_attention(
    model: Any, place: ContextPlace, config: Config, device_type: str
) -> tuple[ContextMethod, UserText]:
    """Let the attention of a model with packed rows exchange keys and values. A collective.

    Args:
        device_type: type of device that the run trains on.

    Returns:
        The method, and a notice.

    Raises:
        ConfigError: the model has layers that need whole rows, or no method computes its attention.
    """
    # The check before the ranks start may have been ended by the end of the tokenization.
    check_context_model(model, config, place.group.axes)
    has_varlen = device_type == "cuda" and attention.has_varlen()
    method = method_of_run(config, place.group.axes, device_type, has_varlen=has_varlen)
    is_packed = attention.attention_of(model) == attention.NAME
    kernel = attention.kernel_of(model) if is_packed else SDPA
    install_context(model, place, method.name, kernel or SDPA)
    notice = UserText(
        "context: {size} ranks divide each row and exchange keys and values by `{method}` ({why})",
        code="context-divided",
        size=place.size,
        method=method.name,
        why=method.why,
    )
    return method, notice


def mixed_samples(config: Config, place: ContextPlace, mixing: UserText | None) -> ConfigError:
    """Return the error for a model that mixes samples which share a row.

    Args:
        mixing: how it mixes them.
    """
    reason = UserText(
        "it mixes samples that share a row; {mixing}", code="context-mixes-samples", mixing=mixing
    )
    return unsupported_model(config, place.group.axes, reason)
