"""Divide the attention of a model among the ranks of a context group."""

from typing import Any

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.models import attention
from paceline.models.context.attention import install_context
from paceline.models.context.choice import ContextMethod, method_of_run
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
    """
    method = method_of_run(config, place.group.axes, device_type)
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
