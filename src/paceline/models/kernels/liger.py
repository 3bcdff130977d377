"""Replace norms, gated MLPs and rotary embeddings of a language model by the Triton kernels of
liger-kernel. The loss stays Paceline's own."""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import FunctionType
from typing import Any

from paceline.config.schema import Config
from paceline.config.schema.tasks import CAUSAL_TASKS
from paceline.core.errors import ConfigError

#: Types of devices for which Triton compiles the kernels.
_DEVICES = ("cuda", "xpu", "npu")
#: The replaced parts, named as the arguments of liger-kernel. Others, such as its fused loss, are
#: turned off.
_PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
_WHAT = "`train_args.use_liger_kernel: true`"
_FIX = "set `train_args.use_liger_kernel: false`"


def check_liger(config: Config, device_type: str) -> None:
    """Check that the devices of a run can compute the kernels. Imports no torch.

    Raises:
        ConfigError: if they cannot, or if the package is not installed.
    """
    if not config.train_args.use_liger_kernel or config.task not in CAUSAL_TASKS:
        return
    if device_type not in _DEVICES:
        raise ConfigError(
            "{subject} is not supported on `{device_type}`: its kernels are written in Triton",
            code="liger-on-device",
            allowed=", ".join(_DEVICES),
            fix=_FIX,
            subject=_WHAT,
            device_type=device_type,
        )
    if find_spec("liger_kernel") is None:
        raise ConfigError(
            "{subject} requires the package `liger-kernel`",
            code="missing-liger",
            fix="run `pip install 'paceline[liger]'`, or {advice}",
            subject=_WHAT,
            advice=_FIX,
        )


def install_liger(model: Any, config: Config) -> None:
    """Replace the forward methods of a transformers model, in place.

    A forward pass on a device without Triton, as in checks before the model is on its device,
    computes the original methods. Names and values of weights do not change. Within the process,
    the rotary embedding of the family is replaced for all models; nothing else is.

    Raises:
        ConfigError: liger-kernel does not support the family.
    """
    from liger_kernel.transformers import monkey_patch

    families = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    kind = model.config.model_type
    if kind not in families:
        raise ConfigError(
            "{subject} is not supported with `model: {model}`: liger-kernel has no kernels for its"
            " family, {kind}",
            code="liger-with-model",
            allowed=", ".join(sorted(families)),
            fix=_FIX,
            subject=_WHAT,
            model=config.model,
            kind=kind,
        )
    apply = families[kind]
    arguments = inspect.signature(apply).parameters
    switches = {
        name: name in _PARTS
        for name, argument in arguments.items()
        if isinstance(argument.default, bool)
    }
    originals = {module: module.forward for module in model.modules()}
    code: Any = sys.modules[type(model).__module__]
    names = dict(vars(code))
    apply(model=model, **switches)
    for module, original in originals.items():
        if module.forward != original:
            module.forward = partial(_on_accelerator, module.forward, original)
    for name, value in names.items():
        replaced = getattr(code, name)
        if replaced is value:
            continue
        if isinstance(value, FunctionType) and value.__module__ == code.__name__:
            setattr(code, name, partial(_on_accelerator, replaced, value))
        else:  # a class; only the modules of this model are replaced
            setattr(code, name, value)


def _on_accelerator(
    kernel: Callable[..., Any], original: Callable[..., Any], first: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call the kernel if the first argument is a tensor on an accelerator, else the original."""
    chosen = kernel if first.device.type in _DEVICES else original
    return chosen(first, *args, **kwargs)
