"""The sections ``parallel``, ``local_sgd`` and ``parameter_server``: how training is distributed
over devices."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, field_validator

from paceline.config.schema.base import Auto, Section, Text, split_names
from paceline.core.texts import UserText

#: Relative speeds of the ranks or hosts of a run.
Weights = Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1)]
#: What ``parallel.cpu_offload`` keeps in host memory.
StateOffload = Literal["none", "optimizer", "all"]
Offload = Literal[StateOffload, "activations"]


class Parallel(Section):
    """How training is distributed over devices."""

    mode: Text = Field(
        "auto",
        description=(
            "`auto`, `single`, `dp`, `ddp`, `zero1`, `zero2`, `zero3` (also called"
            " `fsdp`), `deepspeed`, `tensor`, `pipeline`, `context`, `hybrid`, `local_sgd`,"
            " `diloco`, `parameter_server`, or a custom strategy as `./file.py:SPEC`. `auto`: the"
            " fastest that fits in memory (see `paceline plan`), or `hybrid` if axis sizes"
            " are set."
        ),
    )
    optimize_for: Literal["time", "memory", "cost"] = Field(
        "time",
        description=(
            "What `mode: auto` minimizes: the time per sample, the memory of a rank, or the device"
            " time per sample (`cost`: it may leave devices unused if"
            " `train_args.global_batch_size` is set)."
        ),
    )
    allow_lossy: bool = Field(
        False,
        description=(
            "Allow `mode: auto` to change the result: weights in bfloat16, matrix products in"
            " float8, compressed gradients. Otherwise it only proposes them."
        ),
    )
    data: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Number of replicas. Default: the ranks that the other axes leave."
    )
    shard: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description=(
            "Number of shards of weights, gradients and optimizer state; the rank of each shard"
            " processes its own part of the batch."
        ),
    )
    tensor: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tensor-parallel size: the number of parts each layer is split into."
    )
    pipeline: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Pipeline-parallel size: the number of ranks the layers are divided over."
    )
    context: Annotated[int, Field(ge=1)] | None = Field(
        None,
        description=(
            "Context-parallel size: the number of ranks that the tokens of each packed row are"
            " divided among, for samples that are too long for one device."
        ),
    )
    context_method: Literal["auto", "ring", "ulysses", "gather"] = Field(
        "auto",
        description=(
            "How context-parallel ranks exchange keys and values: `ring` (in blocks, while"
            " others are computed), `ulysses` (each rank computes some heads of all tokens),"
            " `gather` (all keys and values on each rank), or the fastest by estimate."
        ),
    )
    tensor_plan: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Tensor-parallel styles for modules that the model's own plan lacks, as"
            " `{pattern: style}`; patterns such as `layers.*.mlp.up_proj`, styles such as"
            " `colwise`, `rowwise`, `packed_colwise:3`."
        ),
    )
    sequence_parallel: bool | Auto = Field(
        "auto",
        description=(
            "Shard activations between tensor-parallel layers along the sequence (requires"
            " `tensor`). `auto`: where the model's blocks allow it and have no dropout, without a"
            " pipeline."
        ),
    )
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"] = Field(
        "1f1b",
        description=(
            "Order in which a stage runs its micro-batches (torch.distributed.pipelining)."
        ),
    )
    stages_per_rank: Annotated[int, Field(ge=2)] = Field(
        2, description="Stages per rank with `interleaved_1f1b` and `zero_bubble`."
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
            "DeepSpeed JSON (path or mapping). Its values apply where the config sets"
            " none; unsupported settings are errors."
        ),
    )
    cpu_offload: Offload | list[Offload] = Field(
        "none",
        description=(
            "What is in host memory while the accelerator does not need it: the state of the"
            " optimizer (`optimizer`), also the parameters (`all`), or what the blocks save for"
            " backward (`activations`); or a list, such as `[optimizer, activations]`."
        ),
    )
    num_gpus: Auto | Annotated[int, Field(ge=1)] = Field(
        "auto",
        description=(
            "Number of devices per host, one rank each. `auto`: all visible GPUs; without"
            " GPUs, two CPU ranks if there are two cores. With `device: cpu`: the number"
            " of CPU ranks."
        ),
    )
    device: Text = Field(
        "auto",
        description=(
            "`auto`, `cpu`, or an accelerator type (`cuda`, `xpu`, `mps`, …). An"
            " unavailable device is an error; Paceline never falls back."
        ),
    )
    bucket_cap_mb: float = Field(
        25.0,
        gt=0,
        description="Gradient bucket size in MiB; each bucket is all-reduced during backward.",
    )
    reduce_dtype: Literal["float32", "auto"] = Field(
        "float32",
        description=(
            "Data type in which `zero1`, `zero2`, `zero3` and the axis `shard` of `hybrid` reduce"
            " gradients in mixed precision, and in which `zero1` accumulates them: `float32`; or"
            " `auto`, the 16-bit type of the computation, and float32 if shards have replicas."
        ),
    )
    all_reduce_algorithm: Literal["native", "ring", "tree", "halving", "naive"] = Field(
        "native",
        description=(
            "All-reduce algorithm of `ddp`: `native` (the backend's), or one implemented by"
            " Paceline over point-to-point messages. Losses agree up to rounding."
        ),
    )
    collective_timeout_s: float = Field(
        600.0,
        ge=10,
        description="Seconds after which an unfinished collective fails the run.",
    )
    balance: Literal["equal", "speed"] | Weights = Field(
        "equal",
        description=(
            "Micro-batches per rank with `ddp` and `zero1`: `equal`; `speed` (in"
            " proportion to the measured speed of the first steps); or weights, one per"
            " rank or one per host, e.g. `[3, 1]`."
        ),
    )
    nnodes: (
        Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^[1-9][0-9]*:[1-9][0-9]*$")]
    ) = Field(
        1,
        description=(
            "Number of hosts, which all run the same command. `MIN:MAX` such as `1:4`"
            " continues with the hosts that are available."
        ),
    )
    node_rank: Auto | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "Number of this host, from 0. `auto`: 0 on the endpoint host, any free number"
            " on the others."
        ),
    )
    rdzv_endpoint: Text | None = Field(
        None,
        description=(
            "Rendezvous endpoint: the address of one host, as `10.0.0.1` or"
            " `10.0.0.1:29500`; the same on every host."
        ),
    )
    network_interface: Text | None = Field(
        None,
        description=(
            "Network interface between the hosts, such as `eth0`. Default: the one that"
            " routes to `rdzv_endpoint`."
        ),
    )

    @field_validator("cpu_offload", mode="before")
    @classmethod
    def _split_offload(cls, value: object) -> object:
        """Split comma-separated names; a list of a single name is the name."""
        names = split_names(value) if isinstance(value, str) else value
        return names[0] if isinstance(names, list) and len(names) == 1 else names or "none"

    @field_validator("cpu_offload", mode="after")
    @classmethod
    def _check_offload(cls, value: Offload | list[Offload]) -> Offload | list[Offload]:
        if isinstance(value, list) and (len(set(value)) < len(value) or len(value) > 2):
            raise ValueError(
                UserText(
                    "{value}: expected `activations` and one other value",
                    code="offload-values",
                    value=", ".join(value),
                )
            )
        if isinstance(value, list) and ("activations" not in value or "none" in value):
            raise ValueError(
                UserText(
                    "{value} contradict each other",
                    code="contradicting-offload",
                    value=", ".join(value),
                )
            )
        return value

    @field_validator("nnodes", mode="after")
    @classmethod
    def _check_range(cls, value: int | str) -> int | str:
        low, _, high = str(value).partition(":")
        if high and int(low) > int(high):
            raise ValueError(
                UserText(
                    "nnodes {value}: expected MIN:MAX with MIN no larger than MAX",
                    code="invalid-host-range",
                    value=value,
                )
            )
        return value

    @property
    def offloads_activations(self) -> bool:
        """Whether what the blocks save for backward is in host memory meanwhile."""
        return "activations" in self.cpu_offload

    @property
    def state_offload(self) -> StateOffload:
        """Which part of the training state is in host memory."""
        values = self.cpu_offload if isinstance(self.cpu_offload, list) else [self.cpu_offload]
        return next((value for value in values if value != "activations"), "none")

    @property
    def offload_text(self) -> str:
        """The setting as text for messages."""
        values = self.cpu_offload
        return f"[{', '.join(values)}]" if isinstance(values, list) else values

    @property
    def hosts(self) -> tuple[int, int]:
        """Return the minimum and the maximum number of hosts."""
        low, _, high = str(self.nnodes).partition(":")
        return int(low), int(high or low)


class LocalSgd(Section):
    """Settings of `mode: local_sgd` and `mode: diloco`."""

    sync_every: int = Field(
        20,
        ge=1,
        description="Local steps H between two synchronizations.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description=(
            "Number of workers: groups of ranks that train independently and use `ddp`"
            " inside. Default: one per host; on a single host, one per rank."
        ),
    )
    warmup_steps: int = Field(0, ge=0, description="Initial steps of plain `ddp` (post-local SGD).")
    average_optimizer_state: bool = Field(
        False,
        description=(
            "`local_sgd`: average the optimizer's moments together with the parameters,"
            " for more traffic."
        ),
    )
    outer_learning_rate: float = Field(
        0.7, gt=0, description="`diloco`: learning rate of the outer optimizer."
    )
    outer_momentum: float = Field(
        0.9,
        ge=0,
        lt=1,
        description="`diloco`: Nesterov momentum of the outer optimizer; 0 is plain SGD.",
    )
    outer_dtype: Literal["float32", "bf16", "int8"] = Field(
        "float32",
        description=(
            "`diloco`: data type in which outer gradients are sent; they are summed in float32."
        ),
    )
    fragment_sync_delay: int = Field(
        0,
        ge=0,
        description=(
            "Overlap each synchronization with this many further local steps; 0"
            " synchronizes in the foreground."
        ),
    )
    fragment_update_alpha: float = Field(
        0.5,
        ge=0,
        lt=1,
        description=(
            "`diloco` with overlap: weight of a worker's own parameters when the outer"
            " parameters arrive."
        ),
    )
    num_fragments: int = Field(
        1,
        ge=1,
        description=(
            "Number of parameter fragments that are synchronized one at a time, spread"
            " evenly over the H steps."
        ),
    )


class ParameterServer(Section):
    """Settings of `parallel.mode: parameter_server`."""

    num_servers: int = Field(
        1,
        ge=1,
        description=(
            "Number of server processes for the embedding tables, in addition to one"
            " worker for each of `parallel.num_gpus`."
        ),
    )
    consistency: Literal["sync", "async", "bounded"] = Field(
        "sync",
        description=(
            "`sync`: the same steps as `ddp`. `async`: the gradients of each worker are"
            " applied as they arrive, without waiting. `bounded`: `async`, but no worker"
            " is more than `max_staleness` steps ahead of the slowest."
        ),
    )
    max_staleness: int = Field(
        4,
        ge=0,
        description="`bounded`: maximum number of steps a worker may be ahead of the slowest.",
    )
    optimizer: Literal["sgd", "adagrad", "row_wise_adagrad", "adam"] = Field(
        "adagrad",
        description=(
            "Optimizer of the table rows on the servers. `row_wise_adagrad` keeps one"
            " number per row; `adam` updates the moments only of rows in the batch; `sgd`"
            " has no momentum. Dense parameters use `train_args.optim`."
        ),
    )
    dense_placement: Literal["auto", "ddp", "server"] = Field(
        "auto",
        description=(
            "Placement of the dense (non-embedding) parameters. `ddp`: on each worker,"
            " with all-reduced gradients. `server`: divided over the servers by size;"
            " workers pull them before a step and push gradients after it. `auto`:"
            " `server` with `async`, `bounded` or `on_worker_failure: continue`, else `ddp`."
        ),
    )
    on_worker_failure: Literal["restart", "continue"] = Field(
        "restart",
        description=(
            "Reaction to the death of a worker. `restart`: restart all ranks from the latest"
            " checkpoint (see `recovery.max_restarts`). `continue`: the other workers"
            " continue and take over its batches. If a server dies, all ranks restart in"
            " either case."
        ),
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description=("Peak learning rate of the table rows. Default: `train_args.learning_rate`."),
    )

    @property
    def dense_on_servers(self) -> bool:
        """Return whether the dense (non-embedding) parameters are placed on the servers."""
        return self.dense_placement == "server" or (
            self.dense_placement == "auto"
            and (self.consistency != "sync" or self.on_worker_failure == "continue")
        )
