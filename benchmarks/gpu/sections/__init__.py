"""The sections of the GPU benchmark. Correctness comes before speed, and several of its cases run
at a time. Cases with more ranks come later, because they need new processes."""

from dataclasses import replace
from pathlib import Path

from cases import Section

from sections import ceilings, kernels, losses, resume, speed, waits

#: Limit of a case and of a section on simulated devices, where a machine may be slow.
SIMULATED_LIMIT_S = 900.0


def make_sections(prepared: Path, is_simulated: bool) -> list[Section]:
    """Return all sections, in the order in which they run."""
    sections = [
        ceilings.section(is_simulated),
        losses.one_rank_section(prepared, is_simulated),
        waits.waits_section(is_simulated),
        waits.sanitizer_section(is_simulated),
        kernels.section(is_simulated),
        resume.section(),
        losses.several_ranks_section(prepared, is_simulated),
        speed.fit_section(is_simulated),
        speed.section(is_simulated),
    ]
    return [_without_haste(section) for section in sections] if is_simulated else sections


def _without_haste(section: Section) -> Section:
    cases = [replace(case, limit_s=SIMULATED_LIMIT_S) for case in section.cases]
    return replace(section, limit_s=SIMULATED_LIMIT_S, cases=cases)
