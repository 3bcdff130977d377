"""What a parameter server cannot do, and what its ranks do, for a person."""

from __future__ import annotations

from paceline.config.schema import Config
from paceline.config.schema.parameter_server import ParameterServer
from paceline.core.errors import ConfigError
from paceline.parallel.recovery_check import check_rewind


def check_config(config: Config) -> None:
    """Raise ConfigError for settings that do not go with `parallel.mode: parameter_server`, or with
    each other."""
    args = config.train_args
    wrong = {
        "train_args.weight_decay": (
            args.weight_decay > 0 and "rows that no batch has are not touched"
        ),
        "train_args.gradient_checkpointing": (
            args.gradient_checkpointing and "rows would be pulled twice"
        ),
    }
    for key, reason in wrong.items():
        if reason:
            raise ConfigError(
                f"`{key}` does not go with `parallel.mode: parameter_server`: {reason}",
                fix="take it out",
            )
    if args.mixed_dtype == "float16":
        raise ConfigError(
            f"`train_args.precision: {args.precision}` is not supported with `parallel.mode:"
            " parameter_server`: there is no loss scale on the servers",
            fix="set `train_args.precision: 32`",
        )
    _check_dense(config)
    if config.parameter_server.mode != "sync":
        check_rewind(config, f"parameter_server.mode: {config.parameter_server.mode}")
    if config.task in ("sft", "pretrain", "classify"):
        raise ConfigError(
            "`parallel.mode: parameter_server` keeps embedding tables on servers, and `task:"
            f" {config.task}` has none",
            allowed=(
                "`task: recommend`, or a task of your own whose model has"
                " paceline.models.recommend.Table"
            ),
            fix="set `parallel.mode: ddp`, or zero3 where memory is short",
        )


def _check_dense(config: Config) -> None:
    said = config.parameter_server
    if said.dense != "ddp":
        return
    if said.mode != "sync":
        raise ConfigError(
            f"`parameter_server.dense: ddp` does not go with `mode: {said.mode}`: in an all-reduce"
            " each worker waits for the slowest, at every step",
            allowed="`dense: server`, or `mode: sync`",
            fix="leave `parameter_server.dense` out",
        )
    if said.on_worker_loss == "go_on":
        raise ConfigError(
            "`parameter_server.dense: ddp` does not go with `on_worker_loss: go_on`: the workers'"
            " process group, by which they all-reduce, breaks with the first of them that dies",
            allowed="`dense: server`, or `on_worker_loss: stop`",
            fix="leave `parameter_server.dense` out: the servers then have these parameters too",
        )


def who_does_what(said: ParameterServer, num_workers: int, num_ranks: int) -> str:
    """One line: which ranks serve what, which train, and what a loss among them means."""
    what = "the tables and all other parameters" if said.dense_on_servers else "the tables"
    text = f"parameter server: {what} lie on {_ranks(range(num_workers, num_ranks))}; "
    if num_workers == 1:
        return text + "rank 0 trains"
    then = "the others go on" if said.on_worker_loss == "go_on" else "the run ends"
    return text + f"{_ranks(range(num_workers))} train; where one of these dies, {then}"


def _ranks(ranks: range) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks[0]} {'and' if len(ranks) == 2 else 'to'} {ranks[-1]}"
