"""Settings of `parallel.mode: parameter_server`."""

from typing import Literal

from pydantic import Field

from paceline.config.schema.base import Section


class ParameterServer(Section):
    """Settings of `parallel.mode: parameter_server`."""

    servers: int = Field(
        1,
        ge=1,
        description=(
            "Processes that hold the embedding tables, beside one worker for each of"
            " `parallel.num_gpus`."
        ),
    )
    mode: Literal["sync", "async", "bounded"] = Field(
        "sync",
        description=(
            "`sync`: every step is the one of `ddp`. `async`: each worker's gradients are applied"
            " as they come, and nobody waits for them. `bounded`: so, but no worker gets further"
            " ahead of the slowest than `staleness` steps."
        ),
    )
    staleness: int = Field(
        4, ge=0, description="With `bounded`: steps that a worker may be ahead of the slowest."
    )
    optimizer: Literal["sgd", "adagrad", "row_wise_adagrad", "adam"] = Field(
        "adagrad",
        description=(
            "What the servers update the rows of a batch by. `row_wise_adagrad` keeps one number a"
            " row; `adam` moves a row's moments only where the row occurs; `sgd` has no momentum."
            " All other parameters have `train_args.optim`, wherever they are (`dense`)."
        ),
    )
    dense: Literal["auto", "ddp", "server"] = Field(
        "auto",
        description=(
            "Where the parameters are that are no tables. `ddp`: on each worker, their gradients"
            " all-reduced among the workers. `server`: on the servers, dealt by size; a worker"
            " pulls them before its step and pushes their gradients after it. `auto`: `ddp`, but"
            " `server` with `async` and `bounded`, where nobody waits, and with `on_worker_loss:"
            " go_on`."
        ),
    )
    on_worker_loss: Literal["stop", "go_on"] = Field(
        "stop",
        description=(
            "When a worker's process dies. `stop`: all ranks go back to the newest checkpoint, as"
            " after any fault (`recovery.max_restarts`). `go_on`: the other workers go on at once"
            " and share the batches among them; where a server dies its rows are gone, so all go"
            " back then too."
        ),
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak learning rate of the rows. Default: `train_args.learning_rate`.",
    )

    @property
    def dense_on_servers(self) -> bool:
        """Whether the parameters that are no tables lie on the servers."""
        return self.dense == "server" or (
            self.dense == "auto" and (self.mode != "sync" or self.on_worker_loss == "go_on")
        )
