"""The number of loader processes, which depends on the chosen mode. Imports no torch."""

from paceline.config.schema import Config
from paceline.core.texts import UserText
from paceline.data.sources.kinds import classifies_images
from paceline.distributed.devices import cpu_cores
from paceline.models.kinds import reads_images
from paceline.planner.machine.hardware import Machine
from paceline.planner.search.trials import Setting

_MAX_WORKERS = 4


def loader_processes(
    config: Config, num_ranks: int, machine: Machine
) -> tuple[dict[str, Setting], str]:
    """Return the setting of loader processes for images on accelerators, and why; else empty.

    Tokens are read from a mapped file, for which the default of one process is enough. A rank that
    streams its data starts more by itself.
    """
    if machine.is_cpu or "dataloader_num_workers" in config.train_args.model_fields_set:
        return {}, ""
    has_images = reads_images(config) or (config.task == "classify" and classifies_images(config))
    count = min(_MAX_WORKERS, cpu_cores() // num_ranks - 1)
    if not has_images or count < 1:
        return {}, ""
    return {"train_args.dataloader_num_workers": count}, UserText(
        "loader processes decode images ({count} per rank)",
        code="loader-processes-decode",
        count=count,
    )
