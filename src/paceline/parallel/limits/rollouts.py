"""Check that the ranks of a mesh can generate the completions that they train on. Imports no
torch."""

from paceline.config.schema import Config
from paceline.config.schema.tasks import ROLLOUT_TASKS
from paceline.core.errors import ConfigError
from paceline.distributed.mesh import ParallelDims

#: Axes whose ranks hold parts of layers, of rows or of experts.
_DIVIDED = ("tensor", "pipeline", "context", "expert")


def check_rollouts(mode: str, generates: bool, config: Config, dims: ParallelDims) -> None:
    """Check the mesh of a task that generates completions.

    Args:
        generates: whether the strategy can generate.

    Raises:
        ConfigError: the ranks cannot generate, or would have unequal shares.
    """
    if config.task not in ROLLOUT_TASKS:
        return
    axis = next((name for name in _DIVIDED if getattr(dims, name) > 1), None)
    subject, reason = "", None
    if axis is not None:
        subject = f"`parallel.{axis}: {getattr(dims, axis)}`"
        reason = "each rank generates whole completions, with all layers"
    elif not generates:
        subject = f"`parallel.mode: {mode}`"
        reason = "it is untested with weights that change between updates on other ranks"
    elif config.parallel.balance != "equal" and dims.size > 1:
        subject = "`parallel.balance`"
        reason = "the time of a step is mostly the time to generate completions"
    if reason is not None:
        raise ConfigError(
            "`task: {task}` is not supported with {subject}: {reason}",
            code="rollouts-with-mode",
            allowed="`parallel.mode: single`, `ddp`, `zero1`, `zero2`, `zero3`, or `hybrid` with"
            " `data` and `shard`",
            fix="set `parallel.mode: ddp` or `zero3`",
            task=config.task,
            subject=subject,
            reason=reason,
        )
