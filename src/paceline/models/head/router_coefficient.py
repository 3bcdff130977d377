"""The coefficient of the auxiliary loss that balances the experts of a mixture."""

from collections.abc import Mapping

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.builtin import config_numbers
from paceline.models.json_config import JsonObject, language_fields
from paceline.models.kinds import reads_images

#: Tasks whose loss may have this term.
_TASKS = ("sft", "pretrain")
#: Keys of config.json with the coefficient.
_COEFFICIENT_KEYS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
_EXPERT_KEYS = (
    "num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts",
)  # fmt: skip


def model_coefficient(content: JsonObject) -> float | None:
    """Return the coefficient that a model's config.json has; None if it is 0 or absent."""
    nested = content.get("ffn_config")  # DBRX
    for fields in (content, nested if isinstance(nested, Mapping) else {}):
        for key in _COEFFICIENT_KEYS:
            value = fields.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
                return float(value)
    return None


def has_experts(config: Config) -> bool:
    """Return whether the config.json of a run's model has a number of experts."""
    content = language_fields(config_numbers(config.model))
    nested = content.get("ffn_config")  # DBRX
    fields = {**content, **(nested if isinstance(nested, Mapping) else {})}
    return any(fields.get(key) for key in _EXPERT_KEYS)


def coefficient_of(config: Config) -> float:
    """Return the factor of the auxiliary loss in a run; 0 if it is not trained. Without a value in
    the config, the model's config.json decides (``output_router_logits``)."""
    coefficient = config.train_args.router_aux_loss_coef
    if config.task not in _TASKS or reads_images(config) or not has_experts(config):
        return 0.0
    if coefficient is not None:
        return coefficient
    content = language_fields(config_numbers(config.model))
    asks = content.get("output_router_logits") is True
    return (model_coefficient(content) or 0.0) if asks else 0.0


def check_task_of_router_loss(config: Config) -> None:
    """Raise ConfigError if the config asks for an auxiliary loss that the task or the model does
    not have."""
    coefficient = config.train_args.router_aux_loss_coef
    if coefficient and config.task not in _TASKS:
        raise unsupported(coefficient, f"`task: {config.task}`")
    if coefficient and reads_images(config):
        raise unsupported(coefficient, "models that read images")
    if coefficient and config_numbers(config.model) and not has_experts(config):
        raise unsupported(coefficient, f"the model `{config.model}`, which has no experts")


def unsupported(coefficient: float, reason: str) -> ConfigError:
    """Return the error of a config that asks for an auxiliary loss that does not exist."""
    return ConfigError(
        "`train_args.router_aux_loss_coef: {coefficient}` is not supported with {reason}",
        code="router-loss-not-supported",
        allowed="mixtures of experts such as Mixtral, Qwen3-MoE, OLMoE and gpt-oss, with"
        " `task: sft` or `pretrain`",
        fix="remove it, or set it to 0",
        coefficient=f"{coefficient:g}",
        reason=reason,
    )


def check_router_loss(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if the auxiliary loss would be trained with layers that are divided over
    ranks."""
    coefficient = coefficient_of(config)
    names = [name for name in ("tensor", "pipeline") if getattr(dims, name) > 1]
    if coefficient > 0 and names:
        raise ConfigError(
            "the auxiliary loss that balances the experts (coefficient {coefficient}) is not"
            " supported with `parallel.{axis}: {size}`",
            code="router-loss-with-layout",
            fix="set `train_args.router_aux_loss_coef: 0`, or train without `parallel.{axis}`",
            coefficient=f"{coefficient:g}",
            axis=names[0],
            size=getattr(dims, names[0]),
        )
