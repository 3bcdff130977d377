"""What a user must know about the training of a language model: about its adapters, and about what
its config.json asks for and the training leaves out."""

from collections.abc import Iterator
from typing import Any

from paceline.config.schema import Config
from paceline.models.adapters.lora import Notice, adapter_notices
from paceline.models.blocks import base_model
from paceline.models.builtin import config_numbers
from paceline.models.head.router_coefficient import model_coefficient
from paceline.models.head.router_loss import find_router_loss
from paceline.models.json_config import JsonObject, language_fields
from paceline.models.weights.release import release_notice

#: Keys with the number of layers for multi-token prediction, which transformers does not load.
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_Z_LOSS_KEY = "z_loss_coefficient"


def model_notices(model: Any, config: Config) -> list[Notice]:
    """Return the notices about a model with its adapters, which may be on the meta device."""
    notices = adapter_notices(model, config) if config.lora.enable else []
    if (of_release := release_notice(config)) is not None:
        notices.append(("info", of_release))
    settings = getattr(base_model(model), "config", None)
    if settings is None:
        return notices
    router_loss = find_router_loss(base_model(model), config)
    if router_loss is not None:
        notices.append(("info", router_loss.notice()))
    losses = _left_out_losses(
        settings.to_dict() | settings.get_text_config().to_dict(),
        has_router_loss=router_loss is not None or config.train_args.router_aux_loss_coef == 0,
    )
    # The default of transformers is one such layer, which a model need not have: what counts is
    # the model's own file.
    layers = _left_out_layers(config_numbers(config.model))
    return notices + [("warning", text) for text in (*losses, *layers)]


def _left_out_losses(content: JsonObject, has_router_loss: bool) -> Iterator[str]:
    """Yield a text for each term of the loss that a config.json asks for and that is not trained.

    Args:
        has_router_loss: whether the auxiliary loss of the experts is trained, or turned off.
    """
    balance = model_coefficient(content)
    if content.get("output_router_logits") and balance is not None and not has_router_loss:
        yield (
            "loss: the model's config.json asks for the auxiliary loss that balances its experts"
            f" (`output_router_logits: true`, coefficient {balance:g}). The training leaves it out"
            " and minimizes the cross entropy only"
        )
    if (z_loss := _first_positive(content, _Z_LOSS_KEY)) is not None:
        yield (
            f"loss: the model's config.json asks for a z-loss (`{_Z_LOSS_KEY}: {z_loss:g}`). The"
            " training leaves it out and minimizes the cross entropy only"
        )


def _left_out_layers(content: JsonObject) -> Iterator[str]:
    content = language_fields(content)
    for key in _MTP_KEYS:
        if (number := _first_positive(content, key)) is not None:
            yield (
                f"model: its layers for multi-token prediction (`{key}: {number:g}`) are neither"
                " trained nor saved. Serve the trained model without speculative decoding that"
                " uses them"
            )


def _first_positive(content: JsonObject, *keys: str) -> float | None:
    values = (content.get(key) for key in keys)
    numbers = (v for v in values if isinstance(v, int | float) and not isinstance(v, bool))
    return next((float(number) for number in numbers if number > 0), None)
