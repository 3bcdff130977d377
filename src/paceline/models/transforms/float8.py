"""Compute the linear layers of a language model in float8 through torchao: weights stay parameters
of their dtype, and each forward and backward scales and rounds the operands."""

import logging
from dataclasses import replace

from torch import nn

from paceline.config.schema.train_args import TrainArgs
from paceline.core.texts import UserText
from paceline.models.blocks import base_model, find_blocks

#: Float8 kernels multiply matrices whose sizes are multiples of this.
SIZE_MULTIPLE = 16
#: Layers that choose the experts of a token. Their rounding would change the choice.
_ROUTERS = ("gate", "router")


def convert_to_float8(model: nn.Module, args: TrainArgs) -> list[tuple[str, str]]:
    """Replace the linear layers of the blocks by torchao's ``Float8Linear``, in place.

    Parameters are the same objects under the same names, so checkpoints do not depend on it.
    Embeddings, the head, routers, and layers whose sizes are not multiples of 16 are not replaced.

    Returns:
        Notices as (level, text).
    """
    if args.fp8 == "none":
        return []
    # It warns about extensions for other Python versions and devices.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # The product for the gradient of a weight adds over tokens, whose number may be odd.
    recipe = replace(
        Float8LinearConfig.from_recipe_name(args.fp8), pad_inner_dim=True, emulate=args.fp8_emulate
    )
    num_converted = num_linear = 0
    for _, block in find_blocks(base_model(model)):
        names = {name for name, module in block.named_modules() if is_convertible(name, module)}
        num_linear += sum(isinstance(module, nn.Linear) for module in block.modules())
        num_converted += len(names)
        convert_to_float8_training(
            block, config=recipe, module_filter_fn=lambda _, name, names=names: name in names
        )
    rest = "" if num_converted == num_linear else f" of {num_linear}"
    text = f"float8: {num_converted}{rest} linear layers of the blocks, `{args.fp8}` scaling" + (
        ", emulated" if args.fp8_emulate else ""
    )
    notices = [("info" if num_converted else "warning", text)]
    if not args.torch_compile and not args.fp8_emulate:
        notices.append(
            (
                "warning",
                UserText(
                    "float8: without `train_args.torch_compile: true`, scaling and rounding are"
                    " separate kernels, which may take longer than float8 saves",
                    code="float8-without-compile",
                ),
            )
        )
    return notices


def is_convertible(name: str, module: nn.Module) -> bool:
    """Return whether float8 kernels can multiply with the weight of a module that is not a
    router."""
    return (
        type(module) is nn.Linear
        and name.rpartition(".")[2] not in _ROUTERS
        and module.in_features % SIZE_MULTIPLE == module.out_features % SIZE_MULTIPLE == 0
    )
