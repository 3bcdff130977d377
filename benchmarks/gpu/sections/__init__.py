"""The sections of the GPU benchmark. Correctness comes before speed, and runs several at a time."""

from pathlib import Path

from cases import Section

from sections import losses


def make_sections(prepared: Path, is_simulated: bool) -> list[Section]:
    """Return all sections, in the order in which they run."""
    return [
        losses.one_rank_section(prepared, is_simulated),
        losses.several_ranks_section(prepared, is_simulated),
    ]
