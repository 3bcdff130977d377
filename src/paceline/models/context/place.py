"""The place of a rank in context parallelism."""

from dataclasses import dataclass

from paceline.distributed.communicator import Communicator


@dataclass(frozen=True)
class ContextPlace:
    """The place of this rank in the group that divides the tokens of a row.

    Args:
        group: the context group.
    """

    group: Communicator
