"""The names of compression state in a checkpoint."""

from paceline.parallel.compression.local_adam import SECOND
from paceline.parallel.state import StateReader

PREFIX = "compression/"


def dropped(source: StateReader) -> list[tuple[str, str]]:
    """A notice where a checkpoint holds what compression kept, and it is not taken."""
    found = [name for name in source.tensors() if name.startswith(PREFIX) and "/rank-" in name]
    if not found:
        return []
    text = (
        "what gradient compression kept back until the checkpoint is dropped: it was kept by other"
        " ranks or another method"
    )
    if any(name.rpartition("/")[2] in (SECOND, "momentum") for name in found):
        text += "; the optimizer's moments, which each rank had of its own gradient, start anew"
    return [("warning", text)]
