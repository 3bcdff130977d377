"""Check `train_args.fp8` before a run. Imports no torch."""

from paceline.config.packages import check_package
from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.devices import with_capability

#: Lowest compute capability of GPUs that multiply float8 matrices (Ada).
_CAPABILITY = (8, 9)
_OFF = "leave `train_args.fp8` out"


def check_float8(
    config: Config,
    device_type: str,
    capability: tuple[int, int] | None,
    *,
    installed: bool = True,
) -> None:
    """Raise ConfigError if linear layers cannot be computed in float8 on these devices.

    Args:
        capability: lowest compute capability of the devices; None if they are not NVIDIA GPUs.
        installed: whether to check that torchao is installed.
    """
    args = config.train_args
    if args.fp8 == "none":
        return
    what = f"`train_args.fp8: {args.fp8}`"
    if installed:
        check_package("torchao", what, _OFF)
    if args.fp8_emulate:
        if device_type != "cuda" and args.precision != "32":
            raise ConfigError(
                "`train_args.fp8_emulate: true` is not supported with `precision: {precision}` on"
                " `{device_type}`: torchao reads the dtype of autocast on GPUs",
                code="fp8-emulation-with-autocast",
                allowed="`precision: 32`",
                fix="set `train_args.precision: 32`",
                precision=args.precision,
                device_type=device_type,
            )
        return
    if capability is not None and capability >= _CAPABILITY:
        return
    shown = with_capability(device_type, capability)
    raise ConfigError(
        "{subject} is not supported on {shown}: the devices have no float8 products",
        code="fp8-on-device",
        allowed="NVIDIA GPUs of compute capability 8.9 and higher, such as L40S, H100 and B200",
        fix="{off}; to see its effect on the loss, set `train_args.fp8_emulate: true`, which is"
        " slower",
        subject=what,
        shown=shown,
        off=_OFF,
    )
