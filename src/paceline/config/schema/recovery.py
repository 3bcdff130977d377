"""The section ``recovery``: fault handling."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Section


class RecoveryConfig(Section):
    """Fault handling: failed ranks, hosts, links and disks, hangs, and invalid numbers."""

    max_restarts: int = Field(
        3,
        ge=0,
        description=(
            "Restarts from the latest checkpoint before the run fails. The count is reset"
            " by each new checkpoint."
        ),
    )
    save_interval_s: float | None = Field(
        None,
        gt=0,
        description="Maximum seconds between checkpoints, in addition to `save_steps`.",
    )
    mtbf_hours: float | None = Field(
        None,
        gt=0,
        description=(
            "Mean time between failures of a device, in hours. With it, `save_interval_s` is by"
            " default the interval between checkpoints with the least expected loss (Daly)."
        ),
    )
    on_save_error: Literal["continue", "pause"] = Field(
        "continue",
        description=(
            "Reaction to a failed checkpoint write (disk full, quota): `continue` continues"
            " training and retries at the next save; `pause` waits until the checkpoint"
            " can be written."
        ),
    )
    rejoin_timeout_s: float = Field(
        600.0,
        ge=0,
        description=(
            "How long the remaining hosts wait for a lost host to rejoin when they cannot"
            " continue without it."
        ),
    )
    watchdog: bool = Field(
        True,
        description=("Exchange heartbeats between ranks and report hung and slow ranks."),
    )
    hang_warning_s: float = Field(
        5.0,
        ge=1,
        description=(
            "Report a rank as hung after this many seconds without progress (and at least"
            " 10× its typical step time)."
        ),
    )
    hang_timeout_s: float | None = Field(
        None,
        ge=1,
        description=(
            "Seconds without progress after which the ranks are terminated. Default:"
            " `parallel.collective_timeout_s`."
        ),
    )
    rank0_timeout_s: float = Field(
        3600.0,
        ge=1,
        description=(
            "How long the other ranks wait for work that rank 0 does alone, such as writing the"
            " trained model or an upload, while it makes no progress. As long as it makes progress,"
            " they wait without a limit."
        ),
    )
    replica_check_steps: int = Field(
        100,
        ge=0,
        description=(
            "Steps between comparisons of weight hashes across replicas, which also run"
            " before each checkpoint; 0 disables them."
        ),
    )
    max_consecutive_skips: int = Field(
        10,
        ge=1,
        description=(
            "Consecutive steps with non-finite gradients after which the run fails, with"
            " its last good weights saved."
        ),
    )
    rollback_on_loss_spike: bool = Field(
        False,
        description=(
            "On a loss spike, roll back to the previous checkpoint and skip the offending batch."
        ),
    )
    loss_spike_factor: float = Field(
        3.0,
        gt=1,
        description=(
            "Loss spike threshold, as a multiple of the median loss over `loss_spike_window` steps."
        ),
    )
    loss_spike_window: int = Field(50, ge=5, description="Number of steps of the median loss.")
