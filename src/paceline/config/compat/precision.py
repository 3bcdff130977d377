"""The spellings of the precision setting, Paceline's and other tools'."""

from typing import Any

from paceline.config.compat.conversion import Conversion, UnsupportedValue, as_bool, is_off
from paceline.config.entries import short

TARGET = "train_args.precision"
#: Pseudo-targets: keys that take part in the decision, each with its own precedence.
BF16, FP16, DTYPE, MIXED = "_bf16", "_fp16", "_dtype", "_mixed_precision"

_BF16_NAMES = ("bf16", "bfloat16", "bf16-mixed", "bf16_mixed")
_FP16_NAMES = ("fp16", "float16", "half", "16", "16-mixed", "fp16-mixed", "fp16_mixed")
_FLOAT32_NAMES = ("32", "fp32", "float32", "float", "32-true", "fp32-true", "single")
_ALLOWED = "use auto, bf16-mixed, fp16-mixed or 32"


def _mixed(value: Any) -> str | None:
    """The value of ``train_args.precision`` that a spelling stands for; None if it is not a
    spelling of one."""
    name = str(value).lower().removeprefix("torch.")
    if name == "auto":
        return "auto"
    for result, names in (
        ("bf16-mixed", _BF16_NAMES),
        ("fp16-mixed", _FP16_NAMES),
        ("32", _FLOAT32_NAMES),
    ):
        if name in names:
            return result
    return None


def precision(value: Any) -> Conversion:
    """``train_args.precision``, which also takes PyTorch Lightning's spellings."""
    result = None if isinstance(value, bool) else _mixed(value)
    if result is not None:
        return Conversion({TARGET: result})
    name = str(value).lower()
    if name in ("bf16-true", "16-true", "fp16-true"):
        raise UnsupportedValue(
            f"`{name}` (trained weights in half precision) is not supported", _ALLOWED
        )
    if (
        name in ("64", "64-true", "transformer-engine", "transformer-engine-float16")
        or "fp8" in name
    ):
        raise UnsupportedValue(f"`{name}` is not a precision that Paceline trains in", _ALLOWED)
    return Conversion({TARGET: value})  # the schema lists what it takes


def dtype(value: Any) -> Conversion:
    """``torch_dtype`` and its other names: the type that a tool loads the model in."""
    result = _mixed(value)
    if result is None:
        raise UnsupportedValue(
            f"`{value}` is not a precision", "use auto, bfloat16, float16 or float32"
        )
    return Conversion({DTYPE: result})


def mixed_precision(value: Any) -> Conversion:
    """Accelerate's ``mixed_precision``: ``no``, ``fp16``, ``bf16``, ``fp8``."""
    if is_off(value):
        return Conversion({MIXED: "32"})
    result = _mixed(value)
    if result is None:
        raise UnsupportedValue(
            f"`{value}` is not a precision that Paceline trains in", "use no, fp16 or bf16"
        )
    return Conversion({MIXED: result})


def bf16(value: Any) -> Conversion:
    return Conversion({BF16: True if value == "full" else _flag(value)})


def pure_bf16(value: Any) -> Conversion:
    """Trained weights in bfloat16, which is not supported yet."""
    flag = _flag(value)
    says = (
        (
            (
                "warning",
                "trained weights and optimizer states stay in float32, which takes more memory",
            ),
        )
        if flag is True
        else ()
    )
    return Conversion({BF16: flag}, says=says)


def fp16(value: Any) -> Conversion:
    return Conversion({FP16: _flag(value)})


def _flag(value: Any) -> bool | str:
    if isinstance(value, str) and value.lower() == "auto":
        return "auto"
    words = {"1": True, "yes": True, "on": True, "0": False, "no": False, "off": False}
    result = words.get(str(value).lower(), as_bool(value))
    if not isinstance(result, bool):
        raise UnsupportedValue(
            f"expected true, false or auto, got {short(value)}",
            "set `train_args.precision` instead: " + _ALLOWED[4:],
        )
    return result
