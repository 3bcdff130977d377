"""The sections ``parallel``, ``local_sgd`` and ``parameter_server``: how training is spread over
devices."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from paceline.config.schema.base import Auto, Section, Text
from paceline.config.schema.compression import AllReduce

#: relative speeds of the ranks or hosts of a run
Weights = Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]


class Parallel(Section):
    """How training is spread over devices."""

    mode: Text = Field(
        "auto",
        description=(
            "`auto`, `single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3` (also called `fsdp`),"
            " `deepspeed`, `tensor`, `pipeline`, `hybrid`, `local_sgd`, `diloco`,"
            " `parameter_server`, or a strategy of your own as `./file.py:SPEC`. `auto`: the"
            " fastest that fits in memory, as `paceline plan` says; `hybrid` where sizes of axes"
            " are given."
        ),
    )
    data: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Replicas. Default: what the other axes leave."
    )
    shard: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description=(
            "Parts that weights, gradients and optimizer state are cut into; each has its own part"
            " of the batch."
        ),
    )
    tensor: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Parts that each layer is cut into."
    )
    pipeline: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Stages that the layers are dealt to."
    )
    tensor_plan: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "How tensor parallelism cuts modules that the model's own plan does not name, as"
            " `{pattern: colwise}`; patterns such as `layers.*.mlp.up_proj`, styles such as"
            " `colwise`, `rowwise`, `packed_colwise:3`."
        ),
    )
    sequence_parallel: bool = Field(
        False,
        description=(
            "With `tensor`: keep activations between the cut layers in parts too, cut along the"
            " tokens."
        ),
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description="Order in which a stage runs its micro-batches (torch.distributed.pipelining).",
    )
    pipeline_chunks: Annotated[int, Field(ge=2)] = Field(
        2, description="Stages that each rank holds under `interleaved_1f1b` and `zero_bubble`."
    )
    deepspeed_stage: Annotated[int, Field(ge=1, le=3)] | None = Field(
        None,
        description=(
            "ZeRO stage of `mode: deepspeed`. Default: the stage in `deepspeed_config`, else 2."
        ),
    )
    deepspeed_config: Text | dict[str, JsonValue] | None = Field(
        None,
        description=(
            "A DeepSpeed JSON (path or mapping). Its values set the keys that the config leaves"
            " out; settings that cannot be honored are refused."
        ),
    )
    offload: Literal["none", "optimizer", "all"] = Field(
        "none",
        description=(
            "Keep optimizer state (`optimizer`), or parameters too (`all`), in the host's memory:"
            " `zero2`, `zero3` and `deepspeed` on accelerators."
        ),
    )
    num_gpus: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "Number of devices, one rank each. `auto`: every visible GPU; without one, two CPU"
            " ranks where there are two cores. With `device: cpu` it is the number of CPU ranks."
        ),
    )
    device: Text = Field(
        "auto",
        description=(
            "`auto`, `cpu`, or an accelerator type (`cuda`, `xpu`, `mps`…). Never falls back in"
            " silence."
        ),
    )
    bucket_cap_mb: float = Field(
        25.0,
        gt=0,
        description=(
            "Size in MiB of a gradient bucket; each bucket is all-reduced while backward goes on."
        ),
    )
    all_reduce: AllReduce = "native"
    timeout_s: float = Field(
        600.0,
        ge=10,
        description="Seconds after which a collective that does not end fails the run.",
    )
    balance: Literal["equal", "speed"] | Weights = Field(
        "equal",
        description=(
            "Micro-batches of each rank with `ddp` and `zero1`: `equal`; `speed` measures the ranks"
            " in the first steps and assigns micro-batches in proportion; or a list of weights, one"
            " per rank or one per host, as `[3, 1]`."
        ),
    )
    nnodes: (
        Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$")]
    ) = Field(
        1,
        description=(
            "Hosts, each of which gets the same command; `1:4`: at least 1, at most 4, and the run"
            " goes on with those that are there."
        ),
    )
    node_rank: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "This host's number, from 0. `auto`: 0 on the endpoint host, any free number on the"
            " others."
        ),
    )
    rdzv_endpoint: Text | None = Field(
        None,
        description=(
            "Rendezvous endpoint: the address of one of the hosts, as `10.0.0.1` or"
            " `10.0.0.1:29500`; the same on every host."
        ),
    )
    interface: Text | None = Field(
        None,
        description=(
            "Network interface between the hosts, as `eth0`. Default: the one that leads to"
            " `rdzv_endpoint`."
        ),
    )

    @field_validator("nnodes", mode="after")
    @classmethod
    def _low_to_high(cls, value: int | str) -> int | str:
        low, _, high = str(value).partition(":")
        if high and int(low) > int(high):
            raise ValueError(f"nnodes {value}: the first number is the smaller one")
        return value

    @property
    def hosts(self) -> tuple[int, int]:
        """The smallest and the largest number of hosts."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)


class LocalSgd(Section):
    """Settings of `mode: local_sgd` and `mode: diloco`."""

    steps: int = Field(
        20,
        ge=1,
        description="Steps H that each worker makes on its own between two synchronisations.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description=(
            "Groups of ranks that train on their own; the ranks of one share a gradient at each"
            " step, as `ddp` does. Default: one for each machine; on one machine, one for each"
            " rank."
        ),
    )
    warmup_steps: int = Field(
        0, ge=0, description="So many steps of plain `ddp` come first (post-local SGD)."
    )
    average_moments: bool = Field(
        False,
        description=(
            "`local_sgd`: average the optimizer's moments with the parameters, for more traffic."
        ),
    )
    outer_learning_rate: float = Field(
        0.7, gt=0, description="`diloco`: learning rate of the outer optimizer."
    )
    outer_momentum: float = Field(
        0.9, ge=0, lt=1, description="`diloco`: its Nesterov momentum; 0 is plain SGD."
    )
    outer_dtype: Literal["float32", "bf16", "int8"] = Field(
        "float32",
        description="`diloco`: what the outer gradients are sent in; they are added up in float32.",
    )
    overlap_steps: int = Field(
        0,
        ge=0,
        description=(
            "What is averaged travels while so many more steps are made; 0: the workers wait"
            " for it."
        ),
    )
    overlap_mix: float = Field(
        0.5,
        ge=0,
        lt=1,
        description=(
            "`diloco` with overlap: the share of a worker's own parameters in the mixture with the"
            " outer ones when these arrive."
        ),
    )
    fragments: int = Field(
        1,
        ge=1,
        description=(
            "Parts of the parameters that are synchronised one at a time, spread evenly over the H"
            " steps."
        ),
    )


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
