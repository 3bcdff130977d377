"""Check the section `lora` of a config before the model is built. Imports no torch."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from paceline.config.load import Loaded
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.sources.opening import with_slashes
from paceline.models.json_config import JsonObject, read_object

#: Field of `lora` → key of peft's adapter_config.json.
_PEFT_KEYS = {
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
    "target_modules": "target_modules",
    "modules_to_save": "modules_to_save",
}
_VERA_KEYS = {**_PEFT_KEYS, "dropout": "vera_dropout"}


def fit_adapter(loaded: Loaded) -> Loaded:
    """Give the config the settings of the adapter that ``lora.adapter`` continues: its rank and
    scaling cannot change. Settings of the config that differ are reported.

    An adapter of the hub is not read here; see :mod:`paceline.models.adapters.lora`.
    """
    lora = loaded.config.lora
    if not lora.enable or lora.adapter is None:
        return loaded
    folder = Path(with_slashes(lora.adapter)).expanduser()
    content = read_object(folder / "adapter_config.json")
    if content is None:  # reported by the check of the model's files
        return loaded
    values = adapter_settings(content)
    now = lora.model_dump()
    changed = {name: value for name, value in values.items() if now[name] != value}
    ignored = [name for name in changed if name in lora.model_fields_set]
    notices: list[tuple[str, str]] = []
    if ignored:
        listed = ", ".join(
            f"`lora.{name}: {now[name]}` (it has {values[name]})" for name in ignored
        )
        text = UserText(
            "lora.adapter: it keeps its own settings, so these are not used: {listed}",
            code="adapter-keeps-settings",
            listed=listed,
        )
        notices.append(Notice("warning", text))
    if "rank" in values:
        text = UserText(
            "lora.adapter: rank {rank}, alpha {alpha}",
            code="adapter-settings",
            rank=values["rank"],
            alpha=values.get("alpha", "none"),
        )
        notices.append(Notice("info", text))
    config = loaded.config.model_copy(update={"lora": lora.model_copy(update=changed)})
    return replace(loaded, config=config, notices=[*loaded.notices, *notices])


def adapter_settings(content: JsonObject) -> dict[str, object]:
    """Return the fields of `lora` that an adapter_config.json determines."""
    is_vera = content.get("peft_type") == "VERA"
    keys = _VERA_KEYS if is_vera else _PEFT_KEYS
    values: dict[str, object] = {"method": "vera" if is_vera else "lora"}
    for name, key in keys.items():
        value = content.get(key)
        if name == "modules_to_save":
            values[name] = value if isinstance(value, list) else []
        elif name == "target_modules" and isinstance(value, list):
            values[name] = sorted(str(item) for item in value)
        elif value is not None:
            values[name] = value
    return values


def check_adapters(config: Config) -> None:
    """Check that the settings of ``lora`` can be combined, and that the package which
    ``lora.quantize`` requires is installed.

    Raises:
        ConfigError: they cannot, or it is not.
    """
    lora = config.lora
    if not lora.enable:
        if lora.quantize != "none":
            raise ConfigError(
                "`lora.quantize: {quantize}` requires `lora.enable: true`: quantized weights"
                " cannot be trained, only adapters on them",
                code="needs-lora",
                fix="set `lora.enable: true`, or leave `lora.quantize` out",
                quantize=lora.quantize,
            )
        return
    for setting, reason, fix in _conflicts(config):
        raise ConfigError(
            "{setting} is not supported: {reason}",
            code="quantize-not-supported",
            fix=fix,
            setting=setting,
            reason=reason,
        )
    if lora.quantize != "none" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            "`lora.quantize: {quantize}` requires the package bitsandbytes, which is not installed",
            code="missing-bitsandbytes",
            fix='run `pip install "paceline[bitsandbytes]"`',
            quantize=lora.quantize,
        )


def _conflicts(config: Config) -> list[tuple[str, str, str]]:
    """Return the settings that exclude each other: (what, reason, fix)."""
    lora = config.lora
    init = f"`lora.init_lora_weights: {lora.init_lora_weights}`"
    quantize = f"`lora.quantize: {lora.quantize}`"
    conflicts: list[tuple[bool, str, str, str]] = [
        *(
            (
                lora.method == "vera" and is_set,
                f"{setting} with `lora.method: vera`",
                "it concerns the matrices A and B of LoRA, which VeRA does not train",
                f"leave {setting.split(':')[0].strip('`')} out, or set `lora.method: lora`",
            )
            for is_set, setting in (
                (lora.use_dora, "`lora.use_dora: true`"),
                (lora.use_rslora, "`lora.use_rslora: true`"),
                (
                    lora.loraplus_lr_ratio is not None,
                    f"`lora.loraplus_lr_ratio: {lora.loraplus_lr_ratio}`",
                ),
                (lora.init_lora_weights != "default", init),
            )
        ),
        (
            lora.method == "vera" and config.adds_tokens,
            "`new_special_tokens` or `new_tokens` with `lora.method: vera`",
            "peft cannot train a head that shares its weight with the embeddings",
            "set `lora.method: lora`, or do not add tokens",
        ),
        (
            lora.subtracts_adapter and lora.quantize != "none",
            f"{init} with {quantize}",
            "the saved adapter is added to the original weights, not to the quantized rest",
            "leave one of the two out",
        ),
        (
            lora.corrects_rounding and lora.quantize == "none",
            f"{init} with {quantize}",
            "it starts from the rounding error of quantized weights",
            "set `lora.quantize: nf4`, or another initialization",
        ),
        (
            lora.corrects_rounding and lora.use_dora,
            f"{init} with `lora.use_dora: true`",
            "the magnitudes of DoRA are computed from the quantized weights without an adapter",
            "leave one of the two out",
        ),
        (
            config.train_args.torch_compile and lora.quantize != "none",
            f"`train_args.torch_compile: true` with {quantize}",
            "compiled blocks are untested with quantized weights",
            "leave one of the two out",
        ),
        (
            lora.subtracts_adapter and lora.use_dora,
            f"{init} with `lora.use_dora: true`",
            "a trained magnitude cannot be saved as a difference from the original weights",
            "leave one of the two out",
        ),
        (
            lora.init_lora_weights == "orthogonal" and lora.rank % 2 == 1,
            f"{init} with `lora.rank: {lora.rank}`",
            "it needs an even rank",
            f"set `lora.rank: {lora.rank + 1}`",
        ),
        (
            lora.use_dora and lora.quantize == "int8",
            f"`lora.use_dora: true` with {quantize}",
            "peft cannot take the norm of a weight that LLM.int8 stores",
            "set `lora.quantize: nf4`",
        ),
    ]
    return [(what, reason, fix) for applies, what, reason, fix in conflicts if applies]
