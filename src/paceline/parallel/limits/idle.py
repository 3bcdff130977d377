"""Find settings of an axis that the mesh of a run does not have. Imports no torch."""

from collections.abc import Iterator

from paceline.config.schema.parallel import Parallel
from paceline.core.texts import UserText
from paceline.distributed.mesh import ParallelDims

#: Key of ``parallel`` → the axis without which it has no effect.
_AXIS_OF_KEY = {
    "context_method": "context",
    "sequence_parallel": "tensor",
    "tensor_plan": "tensor",
    "pipeline_schedule": "pipeline",
    "stages_per_rank": "pipeline",
}


def notices_of_idle_axes(parallel: Parallel, dims: ParallelDims) -> Iterator[UserText]:
    """Yield a notice for each key that the user set and that has no effect on this mesh. A key with
    its default value has none."""
    for key, axis in _AXIS_OF_KEY.items():
        value = getattr(parallel, key)
        default = Parallel.model_fields[key].get_default(call_default_factory=True)
        is_set = key in parallel.model_fields_set and value not in (default, False)
        if is_set and getattr(dims, axis) == 1:
            yield _notice(key, value, axis)


def _notice(key: str, value: object, axis: str) -> UserText:
    is_mapping = isinstance(value, dict)
    text = "" if is_mapping else f": {str(value).lower() if value is True else value}"
    return UserText(
        "`parallel.{setting}` has no effect: this run has no axis `{axis}` (`parallel.{axis}` is"
        " not set, or 1)",
        code="axis-setting-without-effect",
        setting=f"{key}{text}",
        axis=axis,
    )
