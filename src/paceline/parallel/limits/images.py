"""What vision-language models do not support."""

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims
from paceline.models.kinds import reads_images


def check_vision_language(config: Config, dims: ParallelDims) -> None:
    """Raise ConfigError if a vision-language model would be divided in a way that vision towers do
    not support."""
    names = [name for name in ("context", "tensor", "pipeline") if getattr(dims, name) > 1]
    if names and reads_images(config):
        setting = f"`parallel.{names[0]}: {getattr(dims, names[0])}`"
        raise ConfigError(
            "{setting} is not supported with the vision-language model `{model}`",
            code="vision-language-layout",
            fix="set `parallel.mode: ddp`, `zero1`, `zero2` or `zero3`",
            setting=setting,
            model=config.model,
        )
