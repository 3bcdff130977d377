"""The section ``recovery`` of the schema: what a run does about faults."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Section


class RecoveryConfig(Section):
    """What a run does when a rank, a host, a link, a disk or a number fails."""

    max_restarts: int = Field(
        3,
        ge=0,
        description=(
            "How often the ranks are started again from the newest checkpoint after a fault, before"
            " the run fails. Count begins anew with each checkpoint that is made after a fault."
        ),
    )
    save_every_s: float | None = Field(
        None,
        gt=0,
        description=(
            "A checkpoint whenever so many seconds have passed since the last, beside `save_steps`."
        ),
    )
    on_save_error: Literal["go_on", "pause"] = Field(
        "go_on",
        description=(
            "Where a checkpoint cannot be written (full disk, quota): `go_on` training and try"
            " again at the next save; `pause` until it can be written."
        ),
    )
    rejoin_s: float = Field(
        600.0,
        ge=0,
        description=(
            "How long the hosts that are left wait for one that is gone, where they need it to"
            " go on."
        ),
    )
    watchdog: bool = Field(
        True,
        description=(
            "Each rank says once a second where it is; who hangs, or is slower than the others, is"
            " named."
        ),
    )
    hang_after_s: float = Field(
        5.0,
        ge=1,
        description=(
            "A rank that stands still for longer than this, and than ten usual steps, is named by"
            " the others."
        ),
    )
    hang_timeout_s: float | None = Field(
        None,
        ge=1,
        description=(
            "After so many seconds of standing still the ranks end. Default: `parallel.timeout_s`."
        ),
    )
    check_replicas_steps: int = Field(
        100,
        ge=0,
        description=(
            "Every so many steps and before each checkpoint, replicas compare hashes of their"
            " weights; 0: never."
        ),
    )
    max_skipped_steps: int = Field(
        10,
        ge=1,
        description=(
            "So many steps in a row without a finite gradient end the run, at its last good"
            " weights."
        ),
    )
    rewind_on_spike: bool = Field(
        False,
        description=(
            "Where the loss jumps, go back to the checkpoint before and leave out the batch at"
            " which it did."
        ),
    )
    spike_factor: float = Field(
        3.0,
        gt=1,
        description=(
            "A jump: the loss is so many times its median over the last `spike_window` steps."
        ),
    )
    spike_window: int = Field(50, ge=5, description="Steps of that median.")
