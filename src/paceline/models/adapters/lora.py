"""Add LoRA adapters to a language model, through peft."""

import warnings
from pathlib import Path
from typing import Any

from torch import nn

from paceline.config.schema import Config
from paceline.core.errors import ConfigError, first_line
from paceline.core.texts import UserText
from paceline.data.sources.opening import with_slashes
from paceline.models import qwen
from paceline.models.adapters.initialization import add_initial_buffers, correct_rounding
from paceline.models.adapters.quantize import expert_weights
from paceline.models.adapters.stored import check_stored_adapter
from paceline.models.adapters.targets import (
    WHY_BYPASSED,
    WHY_ROUTER,
    WHY_SPECIAL,
    adapter_layers,
    bypassed_modules,
    check_names,
    ineffective_adapters,
    linear_modules,
    pattern_of,
    routers,
    selects_all_linear,
    short_names,
    special_linear_modules,
    target_names,
)
from paceline.models.kinds import reads_images
from paceline.models.new_tokens import added_tokens, embedding_names, has_tied_head
from paceline.models.vision.parts import frozen_patterns, in_frozen_part

Notice = tuple[str, str]

_ADAPTER = "default"

#: Initializations of peft that do not depend on the weights of the model.
_BLIND_INITS = ("gaussian", "orthogonal")

#: Layers of peft that do not support dropout.
_WITHOUT_DROPOUT = ("ParamWrapper", "MultiheadAttention")


def add_adapters(model: Any, config: Config, read_weights: bool = True) -> nn.Module:
    """Add the adapters that the config describes to ``model``, on its device. Trained parameters
    are float32.

    Args:
        read_weights: whether to read the weights of ``lora.adapter``, not only its configuration.

    Raises:
        ConfigError: the adapters do not fit the model. The message lists the names of its modules.
    """
    import torch

    if getattr(getattr(model, "config", None), qwen.CONVERTED_KEY, None):
        config = qwen.with_qwen2_modules(config)
    adapted = (
        _create_adapters(model, config)
        if config.lora.adapter is None
        else _load_adapters(model, config, read_weights)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad and parameter.dtype in (torch.float16, torch.bfloat16):
            parameter.data = parameter.data.float()
    return adapted  # type: ignore[no-any-return]


def _load_adapters(model: Any, config: Config, read_weights: bool) -> Any:
    from peft import PeftConfig, get_peft_model

    lora = config.lora
    key = f"`lora.adapter: {lora.adapter}`"
    folder = str(Path(with_slashes(str(lora.adapter))).expanduser())
    absent: list[str] = []
    try:
        settings = PeftConfig.from_pretrained(folder)
        if settings.peft_type not in ("LORA", "VERA"):
            raise ConfigError(
                "{key} is an adapter of the type {peft_type}",
                code="unknown-adapter-type",
                allowed="an adapter of LoRA, with or without DoRA, or of VeRA",
                key=key,
                peft_type=str(settings.peft_type).rpartition(".")[2],
            )
        settings.inference_mode = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path`")
            adapted = get_peft_model(model, settings)
        check_stored_adapter(adapted, folder, key)
        if read_weights:
            # By default peft reads the weights to the first GPU, in every process.
            result = adapted.load_adapter(folder, _ADAPTER, is_trainable=True, torch_device="cpu")
            absent = list(result.missing_keys)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "{key} cannot be loaded: {reason}",
            code="adapter-not-loaded",
            key=key,
            reason=first_line(error),
        ) from error
    if absent:
        raise ConfigError(
            "{key} does not fit the model: its file has no weights for {short_names}",
            code="adapter-without-weights",
            fix="give the adapter of this model",
            key=key,
            short_names=short_names(absent),
        )
    if any(not _supports_dropout(layer) for _, layer in adapter_layers(adapted)):
        # Such an adapter is saved without its dropout, because peft would not load it otherwise.
        set_dropout(adapted, lora.dropout)
    return adapted


def _create_adapters(model: Any, config: Config) -> Any:
    from peft import get_peft_model

    targets = config.lora.target_modules
    # peft replaces modules, so after an error the names would be the names of its wrappers.
    allowed = "all-linear, or some of: " + ", ".join(target_names(model))
    check_names(model, config)
    selects_all = selects_all_linear(config)
    settings = _peft_config(model, config)
    try:
        with warnings.catch_warnings():
            # peft warns about its automatic choices: transposed weights (GPT-2), ranks of fused
            # experts.
            warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")
            adapted = get_peft_model(model, settings)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise ConfigError(
            "`lora.target_modules: {targets}` does not fit this model: {reason}",
            code="unfit-target-modules",
            allowed=allowed,
            fix=(
                "leave `lora.use_dora` out, or list modules of `lora.target_modules` that are not"
                " experts"
            )
            if "use_dora" in str(error)
            else None
            if selects_all
            else "set `lora.target_modules: all-linear`, which selects the modules that fit",
            targets=targets,
            reason=first_line(error),
        ) from error
    set_dropout(adapted, config.lora.dropout)
    if config.lora.subtracts_adapter:
        add_initial_buffers(adapted, config)
    if config.lora.corrects_rounding:
        correct_rounding(adapted, config)
    return adapted


def _peft_config(model: Any, config: Config) -> Any:
    """Return peft's configuration of new adapters, without dropout, which is applied afterwards to
    the layers that support it."""
    from peft import LoraConfig, VeraConfig

    lora = config.lora
    targets, init = lora.target_modules, lora.init_lora_weights
    left_out: list[str] = []
    if selects_all_linear(config):
        left_out = [*bypassed_modules(model), *special_linear_modules(model), *routers(model)]
    excluded = [pattern_of(left_out)] if left_out else []
    if reads_images(config):
        excluded += frozen_patterns(model, config)
    embeddings = embedding_names(model) if added_tokens(config) is not None else []
    shared: dict[str, Any] = {
        "r": lora.rank,
        "modules_to_save": [*lora.modules_to_save, *embeddings] or None,
        "bias": "none",
        # With "SEQ_CLS", peft also trains the head of a classifier in full, and saves it.
        "task_type": "SEQ_CLS" if config.task in ("classify", "reward") else "CAUSAL_LM",
    }
    if lora.method == "vera":
        if left_out:  # VeraConfig cannot exclude modules
            targets = pattern_of(name for name in linear_modules(model) if name not in left_out)
        # The random matrices are the same for the same key, so checkpoints need not contain them.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Specified to not save vera_A")
            return VeraConfig(
                target_modules=targets if isinstance(targets, str) else list(targets),
                save_projection=False,
                **shared,
            )
    settings = LoraConfig(
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules="|".join(excluded) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        ensure_weight_tying=bool(embeddings) and has_tied_head(model),
        # The others read the weights, which a model on the meta device does not have.
        **shared | {"init_lora_weights": init if init in _BLIND_INITS else True},
    )
    if selects_all_linear(config):
        _select_parameters(settings, model, config, left_out)
    return settings


def _select_parameters(settings: Any, model: Any, config: Config, left_out: list[str]) -> None:
    """Select the weights of linear layers that have the names of projections of experts.

    In architectures whose experts peft adapts as parameters, it takes such names for the experts,
    and also selects the router.
    """
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    convert_peft_config_for_transformers(settings, model, None)
    selected = set(settings.target_parameters or ())
    if not selected:
        return
    names = {f"{name}.weight" for name in routers(model)}
    selected = {each for each in selected if not any(name.endswith(f".{each}") for name in names)}
    if config.lora.quantize == "none":  # a quantized weight is no matrix
        has_frozen = reads_images(config)
        shadowed = [
            name
            for name in linear_modules(model)
            if name not in left_out
            and name.rpartition(".")[2] not in settings.target_modules
            and not (has_frozen and in_frozen_part(name, config))
        ]
        selected |= {f"{short_names([name])}.weight" for name in shadowed}
    settings.target_parameters = selected


def set_dropout(adapted: Any, dropout: float) -> None:
    """Apply ``dropout`` to the input of every adapter that supports it.

    peft does not support dropout for an adapter on a parameter (the experts of a mixture), and does
    not load an adapter of such parameters whose configuration has a dropout.
    """
    if dropout <= 0:
        return
    layers = [layer for _, layer in adapter_layers(adapted)]
    accepting = [layer for layer in layers if _supports_dropout(layer)]
    for layer in accepting:
        _dropouts(layer)[_ADAPTER] = nn.Dropout(dropout).train(layer.training)
    if len(accepting) == len(layers):
        settings = adapted.peft_config[_ADAPTER]
        setattr(settings, "vera_dropout" if is_vera(adapted) else "lora_dropout", dropout)


def _dropouts(layer: Any) -> nn.ModuleDict:
    """Return the dropout of an adapter layer, by adapter."""
    dropouts: nn.ModuleDict = (
        layer.lora_dropout if hasattr(layer, "lora_dropout") else layer.vera_dropout
    )
    return dropouts


def is_vera(adapted: Any) -> bool:
    """Return whether the adapters of a model are VeRA adapters."""
    return str(adapted.peft_config[_ADAPTER].peft_type.value) == "VERA"


def learning_rate_factors(model: nn.Module, config: Config) -> dict[str, float]:
    """Return, by name, the factor of the learning rate for the parameters that have one: with LoRA+
    (Hayou et al., "LoRA+: Efficient Low Rank Adaptation of Large Models", 2024), the matrices
    B."""
    ratio = config.lora.loraplus_lr_ratio if config.lora.enable else None
    if ratio is None:
        return {}
    return {name: ratio for name, _ in model.named_parameters() if ".lora_B." in name}


def _supports_dropout(layer: Any) -> bool:
    return type(layer).__name__ not in _WITHOUT_DROPOUT


# -- notices
# ------------------------------------------------------------------------------------------------
def adapter_notices(adapted: Any, config: Config) -> list[Notice]:
    """Return notices about dropout that cannot be applied and modules without an adapter."""
    lora = config.lora
    notices: list[Notice] = []
    if lora.adapter is None and added_tokens(config) is not None:
        names = short_names(embedding_names(adapted.get_base_model()))
        text = UserText(
            "LoRA: tokens are added, so these are trained in full and saved: {names}",
            code="trained-with-new-tokens",
            names=names,
        )
        notices.append(("info", text))
    layers = dict(adapter_layers(adapted))
    without = [
        f"{name}.{getattr(layer, 'parameter_name', '')}".rstrip(".")
        for name, layer in layers.items()
        if not _supports_dropout(layer)
    ]
    if without and lora.dropout > 0:
        level = "warning" if "dropout" in lora.model_fields_set else "info"
        applies_to = "the other adapters only" if len(without) < len(layers) else "no adapter"
        text = UserText(
            "lora.dropout: {dropout} applies to {applies_to}; peft cannot apply dropout to"
            " {short_names}",
            code="dropout-not-applied",
            dropout=f"{lora.dropout:g}",
            applies_to=applies_to,
            short_names=short_names(without),
        )
        notices.append((level, text))
    if lora.quantize != "none" and (kept := expert_weights(adapted)):
        names = short_names(kept)
        text = UserText(
            "lora.quantize: {quantize} does not apply to {names}, which are no linear layers",
            code="quantize-not-applied",
            quantize=lora.quantize,
            names=names,
        )
        notices.append(("info", text))
    if selects_all_linear(config) and lora.adapter is None:
        saved = adapted.peft_config[_ADAPTER].modules_to_save or []
        wrapped = ["modules_to_save", "original_module"]
        notices += _left_out(adapted.get_base_model(), [*saved, *wrapped], config)
    elif ineffective := ineffective_adapters(adapted):
        names = short_names(ineffective)
        notices.append(
            (
                "warning",
                UserText(
                    "LoRA: the adapters on {names} may have no effect: {why_bypassed}",
                    code="adapter-may-have-no-effect",
                    names=names,
                    why_bypassed=WHY_BYPASSED,
                ),
            )
        )
    return notices


def _left_out(base: Any, saved: list[str], config: Config) -> list[Notice]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    notices: list[Notice] = []
    bypassed = bypassed_modules(base)
    if bypassed:
        notices.append(
            (
                "info",
                UserText(
                    "LoRA: no adapter on {short_names}: {why_bypassed}",
                    code="no-adapter-on-bypassed",
                    short_names=short_names(bypassed),
                    why_bypassed=WHY_BYPASSED,
                ),
            )
        )
    if special := special_linear_modules(base):
        notices.append(
            (
                "info",
                UserText(
                    "LoRA: no adapter on {short_names}: {why_special}",
                    code="no-adapter-on-special",
                    short_names=short_names(special),
                    why_special=WHY_SPECIAL,
                ),
            )
        )
    unadapted = [name for name in routers(base) if name not in special]
    if unadapted:
        text = UserText(
            "LoRA: no adapter on {short_names}: {why_router}",
            code="no-adapter-on-routers",
            short_names=short_names(unadapted),
            why_router=WHY_ROUTER,
        )
        notices.append(("info", text))
    inside = tuple(
        f"{name}." for name, module in base.named_modules() if isinstance(module, BaseTunerLayer)
    )
    has_frozen = reads_images(config)
    linear = [
        name
        for name in linear_modules(base)
        if name not in bypassed
        and name not in unadapted
        and not (has_frozen and in_frozen_part(name, config))
        and not name.startswith(inside)
        and not any(part in saved for part in name.split("."))
    ]
    experts = expert_weights(base)
    plain = [*linear, *(name for name in experts if not name.startswith(inside))]
    if plain:
        text = UserText(
            "LoRA: no adapter on {short_names}: peft does not select these in this architecture",
            code="no-adapter-selected",
            short_names=short_names(plain),
        )
        notices.append(("info", text))
    return notices
