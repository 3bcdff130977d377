"""The lines of the source that make a call, for what the simulation records."""

import os
from collections.abc import Iterator
from types import FrameType

import torch.distributed as dist

import paceline

_SOURCE = os.path.dirname(paceline.__file__) + os.sep
_PACKAGES = os.path.dirname(os.path.dirname(dist.__path__[0])) + os.sep


def find_sites(frame: FrameType | None, excluded: tuple[str, ...]) -> tuple[str, str]:
    """Return the innermost line of Paceline, as `train/trainer.py:42 step`, which is empty for a
    call of autograd's thread; and the innermost line of all, if it is not the same, or an empty
    string.

    Args:
        excluded: beginnings of the names of files that belong to the recording.
    """
    frames = [*_frames(frame, (*excluded, f"{_SOURCE}simulation{os.sep}"))]
    site = next((each for each in frames if each.f_code.co_filename.startswith(_SOURCE)), None)
    innermost = frames[0] if frames and frames[0] is not site else None
    return _line(site), _line(innermost)


def _frames(frame: FrameType | None, excluded: tuple[str, ...]) -> Iterator[FrameType]:
    """Yield the frames that called, innermost first, without the frames of the recorder."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(excluded):
            yield frame
        frame = frame.f_back


def _line(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    path = frame.f_code.co_filename.removeprefix(_SOURCE).removeprefix(_PACKAGES)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
