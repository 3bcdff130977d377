"""The results of a search in the JSON of a plan."""

from typing import TypedDict

from paceline.planner.estimate import MemoryReport
from paceline.planner.search.lossy import Proposal
from paceline.planner.search.machines import Offer
from paceline.planner.search.search import Candidate
from paceline.planner.search.trials import Setting


class SetupReport(TypedDict):
    """A mode with the settings that select it; ``memory_bytes`` is on the rank that uses most."""

    mode: str
    settings: dict[str, Setting]
    fits: bool
    memory_bytes: MemoryReport
    step_time_s: float | None
    step_time_range_s: list[float] | None
    samples_per_second: float | None
    global_batch_size: int


class ProposalReport(SetupReport):
    """A set-up with another result, and what changes it."""

    effect: str


class OfferReport(SetupReport):
    """A machine that finishes the run in time. ``price``: null without prices."""

    device: str
    num_devices: int
    run_time_s: float
    device_hours: float
    price: float | None


def setup_report(candidate: Candidate) -> SetupReport:
    mode = candidate.mode
    return SetupReport(
        mode=mode.name,
        settings=dict(candidate.all_settings),
        fits=mode.fits,
        memory_bytes=mode.as_dict()["memory_bytes"],
        step_time_s=mode.step_time_s,
        step_time_range_s=None if mode.time is None else mode.time.range_s,
        samples_per_second=None if mode.time is None else mode.per_second,
        global_batch_size=mode.global_batch_size,
    )


def proposal_report(proposal: Proposal) -> ProposalReport:
    return ProposalReport(**setup_report(proposal.candidate), effect=proposal.effect)


def offer_report(offer: Offer, has_prices: bool) -> OfferReport:
    return OfferReport(
        **setup_report(offer.candidate),
        device=offer.machine.name,
        num_devices=offer.machine.count,
        run_time_s=offer.seconds,
        device_hours=offer.device_hours,
        price=offer.price if has_prices else None,
    )
