"""The checks that cost nothing, made at the start of every run."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.doctor.check import Check
from paceline.doctor.machine import check_open_files, check_shared_memory, check_threads
from paceline.doctor.network import check_port


def quick_checks(config: Config, device_type: str, num_ranks: int) -> list[Check]:
    """What is not well on this host, of what a run can be told within a millisecond. Does not
    import torch."""
    found = [
        check_open_files(),
        check_shared_memory(
            num_ranks, config.train_args.dataloader_num_workers, device_type != "cpu"
        ),
    ]
    if device_type == "cpu":
        found.append(check_threads(num_ranks))
    if num_ranks > 1:
        found.append(check_port())
    return [one for one in found if not one.ok]
