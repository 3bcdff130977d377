"""`task: recommend`: click prediction from sparse features (IDs) and dense features (numbers)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from paceline.core.errors import ConfigError
from paceline.core.formatting import counted
from paceline.core.texts import UserText
from paceline.data.cache import key_of
from paceline.data.clicks.log import (
    ClickLog,
    LogMeta,
    RowIndex,
    builtin_clicks,
    exact_auc,
    load_log,
    load_meta,
)
from paceline.data.clicks.reader import read_clicks
from paceline.data.counts import DataCounts
from paceline.data.encoding.prepare import split_indices, split_notice
from paceline.data.sources.opening import Take, number_to_take, take_count
from paceline.distributed.seeds import derive_seed
from paceline.models.recommend import (
    build_click_model,
    check_click_model,
    model_args,
    save_click_model,
)
from paceline.tasks.base import (
    ModelStateReader,
    Notice,
    Prepared,
    Task,
    dropped_notice,
    language_settings_notices,
)


@dataclass(frozen=True)
class RecommendData:
    """The prepared data in the cache, and which rows are held out for validation."""

    train: Path
    evaluation: Path | None
    split: float
    seed: int
    take: Take | None
    take_evaluation: Take | None
    mean: np.ndarray
    std: np.ndarray
    tables: tuple[int, ...]


class RecommendTask(Task):
    """Trains a click model on `builtin:clicks` or on a click log of the user.

    The loss is binary cross entropy in nats, summed over rows; validation adds the exact AUC, and
    `best_auc`, the AUC of the true click probabilities if they are known.
    """

    unit = "rows"
    default_learning_rate = 1e-3
    gathers = ("score", "label", "chance")

    def check(self) -> None:
        config = self.config
        if config.lora.enable:
            raise ConfigError(
                "`lora.enable: true` is not supported with `task: {task}`: click models are"
                " trained in full",
                code="lora-with-task",
                fix="remove it",
                task="recommend",
            )
        for key in ("dataset", "val_dataset"):
            sources = config.sources(validation=key == "val_dataset")
            if len(sources) > 1:
                raise ConfigError(
                    "several sources in `{key}` are not supported with `task: recommend`",
                    code="several-files",
                    fix="put the rows into one file",
                    key=key,
                )
            if sources and not sources[0].path.startswith("builtin:"):
                self._check_columns()
        check_click_model(config.model)

    def _check_columns(self) -> None:
        settings = self.config.recommend
        if not settings.sparse_features:
            raise ConfigError(
                "`recommend.sparse_features` is empty",
                code="missing-sparse-features",
                allowed="at least one column for a click log of your own",
                fix="set `recommend.sparse_features: [user, item]` and `recommend.dense_features:"
                " [age]` to the names of your columns",
            )
        columns = [settings.label, *settings.dense_features, *settings.sparse_features]
        repeated = sorted({f"`{name}`" for name in columns if columns.count(name) > 1})
        if repeated:
            raise ConfigError(
                "`recommend` names {repeated} more than once",
                code="repeated-feature",
                repeated=", ".join(repeated),
            )
        if isinstance(settings.table_size, dict):
            unknown = [name for name in settings.table_size if name not in settings.sparse_features]
            if unknown:
                raise ConfigError(
                    "`recommend.table_size` names `{unknown}`, which is not one of"
                    " `recommend.sparse_features`",
                    code="unknown-feature",
                    allowed=", ".join(settings.sparse_features),
                    unknown=unknown[0],
                )

    def prepare(self) -> Prepared:
        """Convert the data and store them in the cache, unless they are there already.

        Raises:
            ConfigError: there are no usable rows, or an ID has no row in its table.
        """
        config = self.config
        name, take = take_count(config.sources()[0].path)
        train = self._read(name, None)
        validation, take_validation = None, None
        if config.val_dataset is not None:
            val_name, take_validation = take_count(config.sources(validation=True)[0].path)
            if (val_name.startswith("builtin:")) != (name.startswith("builtin:")):
                raise ConfigError(
                    "`val_dataset: {source}` and `dataset` are not of the same kind",
                    code="different-validation-kind",
                    fix="give files for both",
                    source=val_name,
                )
            validation = self._read(val_name, train)
        empty: Any = None
        handle = RecommendData(
            train,
            validation,
            config.split_dataset_ratio,
            config.train_args.seed,
            take,
            take_validation,
            empty,
            empty,
            (),
        )
        rows, held_out = _split(handle)
        mean, std = rows.scale()
        handle = replace(handle, mean=mean, std=std, tables=rows.tables)
        meta = load_meta(train)
        kept = len(rows) + (len(held_out) if held_out is not None and validation is None else 0)
        taken = meta["read"] if take is None else kept + sum(meta["dropped"].values())
        notices = language_settings_notices(config)
        notices += _summary(name, rows, held_out, meta)
        if validation is None and config.split_dataset_ratio > 0:
            notices.append(split_notice(kept - len(rows), kept, config.split_dataset_ratio, "row"))
        return Prepared(
            num_train=len(rows),
            num_eval=0 if held_out is None else len(held_out),
            counts=DataCounts(read=taken, kept=kept, dropped=dict(meta["dropped"])),
            notices=notices,
            fingerprint=key_of(
                [train.name, take, config.split_dataset_ratio, config.train_args.seed]
            ),
            handle=handle,
        )

    def _read(self, name: str, train: Path | None) -> Path:
        return (
            builtin_clicks(name)
            if name.startswith("builtin:")
            else read_clicks(name, self.config.recommend, train)
        )

    def build_datasets(self) -> tuple[Any, Any | None]:
        return _split(self._handle)

    def build_model(self) -> nn.Module:
        handle: RecommendData = self._handle
        args = model_args(self.config, len(handle.mean), handle.tables)
        return build_click_model(self.config.model, args)

    def collate(self, samples: Sequence[RowIndex]) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Return a batch: ``label`` float32 [N], ``dense`` float32 [N, D], and for each table
        ``ids`` int64 [n] and ``starts`` int64 [N + 1]."""
        places = np.array([row.array_row for row in samples], dtype=np.int64)
        return {
            name: (
                [torch.from_numpy(array) for array in value]
                if isinstance(value, list)
                else torch.from_numpy(value)
            )
            for name, value in samples[0].log.batch(places)._asdict().items()
            if value is not None
        }

    def count(self, batch: Any) -> int:
        return int(batch["label"].shape[0])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the binary cross entropy in nats, summed over the rows."""
        return _logits_and_loss(model, batch)[1]

    def evaluate(self, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        """Return the sum ``loss`` and the values per row ``score`` (the logit), ``label`` and, if
        known, ``chance`` (the true click probability)."""
        logits, loss = _logits_and_loss(model, batch)
        results = {"loss": loss, "score": logits, "label": batch["label"]}
        if "chance" in batch:
            results["chance"] = batch["chance"]
        return results

    def metric_names(self, prepared: Prepared) -> list[str]:
        return ["loss", "auc", "best_auc"]

    def metrics(self, gathered: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the exact ``auc`` over the full validation set and, if the true click
        probabilities are known, their AUC as ``best_auc``."""
        labels = gathered["label"].numpy()
        metrics = {"auc": exact_auc(labels, gathered["score"].numpy())}
        if len(gathered["chance"]):
            metrics["best_auc"] = exact_auc(labels, gathered["chance"].numpy())
        return metrics

    def save_model(self, model: nn.Module, folder: Path) -> None:
        """Write the weights, the tables and the description of the inputs, so that
        :func:`paceline.models.recommend.load_recommender` can load the model."""
        params: dict[str, torch.Tensor] = dict(model.named_parameters())
        dense = {name: param for name, param in params.items() if not _is_table(name)}
        self._save(folder, dense, params.__getitem__)

    def save_from(self, source: ModelStateReader, folder: Path) -> bool:
        shapes = {
            name.removeprefix("model/"): shape
            for name, (_, shape) in source.tensors().items()
            if name.startswith("model/")
        }

        class StoredRows:
            """A table in the checkpoint, from which ranges of rows are read."""

            def __init__(self, name: str) -> None:
                self.name = name
                self.shape = shapes[name]

            def __getitem__(self, rows: slice) -> torch.Tensor:
                return source.read(
                    f"model/{self.name}", (rows.start, 0), (rows.stop - rows.start, self.shape[1])
                )

        dense = {
            name: source.read(f"model/{name}", (0,) * len(shape), shape)
            for name, shape in shapes.items()
            if not _is_table(name)
        }
        self._save(folder, dense, StoredRows)
        return True

    def _save(self, folder: Path, dense: dict[str, torch.Tensor], table: Any) -> None:
        settings = self.config.recommend
        handle: RecommendData = self._handle
        meta = load_meta(handle.train)
        form = {
            "dense": settings.dense_features
            or [f"d{number + 1}" for number in range(len(handle.mean))],
            "categorical": list(meta["names"]),
            "ids": settings.id_mapping,
            "mean": handle.mean.tolist(),
            "std": handle.std.tolist(),
            "vocabulary": meta.get("vocabulary"),
        }
        tables = []
        for number, rows in enumerate(handle.tables):
            name = f"tables.{number}.weight"
            weight = table(name)
            tables.append((name, rows, lambda start, stop, weight=weight: weight[start:stop]))
        args = model_args(self.config, len(handle.mean), handle.tables)
        save_click_model(folder, args, form, dense, tables)


def _is_table(name: str) -> bool:
    return name.startswith("tables.")


def _logits_and_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits [N] and their binary cross entropy, summed over the rows."""
    logits = model(batch["dense"], batch["ids"], batch["starts"]).float()
    loss = functional.binary_cross_entropy_with_logits(logits, batch["label"], reduction="sum")
    return logits, loss


def _split(handle: RecommendData) -> tuple[ClickLog, ClickLog | None]:
    """Return the training and the validation rows."""

    def sample(log: ClickLog, take: Take | None) -> ClickLog:
        if take is None or (number := number_to_take(take, len(log))) >= len(log):
            return log
        order = np.random.default_rng(derive_seed(handle.seed, "take")).permutation(len(log))
        return log.take(np.sort(order[:number]))

    rows, held_out = sample(load_log(handle.train), handle.take), None
    if handle.evaluation is not None:
        held_out = sample(load_log(handle.evaluation), handle.take_evaluation)
    elif handle.split > 0:
        train_indices, held_out_indices = split_indices(len(rows), handle.split, handle.seed)
        if len(held_out_indices):
            held_out = rows.take(held_out_indices)
        rows = rows.take(train_indices)
    if handle.mean is None:
        return rows, held_out
    rows = replace(rows, mean=handle.mean, std=handle.std)
    if held_out is not None:
        held_out = replace(held_out, mean=handle.mean, std=handle.std)
    return rows, held_out


def _summary(name: str, rows: ClickLog, held_out: ClickLog | None, meta: LogMeta) -> list[Notice]:
    columns = ", ".join(
        f"{column} {size:,}" for column, size in zip(rows.names, rows.tables, strict=True)
    )
    clicks = float(rows.column(rows.labels).mean())
    text = UserText(
        "{name}: {rows}, {clicks} clicks; rows of the tables: {columns}",
        code="click-log-size",
        name=name,
        rows=counted(len(rows), "training row"),
        count=f"{len(rows):,}",
        clicks=f"{clicks:.1%}",
        columns=columns,
    )
    notices: list[Notice] = [("info", text)]
    if meta["dropped"]:
        notices.append(dropped_notice(name, meta["dropped"], "rows"))
    if held_out is not None:
        notices.append(("info", _validation_text(held_out)))
    return notices


def _validation_text(held_out: ClickLog) -> UserText:
    best = ""
    if held_out.chance is not None:
        auc = exact_auc(held_out.column(held_out.labels), held_out.column(held_out.chance))
        best = f"{auc:.4f}"
    return UserText(
        "validation: {rows:row}{limit}",
        code="validation-clicks",
        rows=len(held_out),
        limit=f"; a model can reach an AUC of at most {best}, the AUC of the true click"
        " probabilities"
        if best
        else "",
        best=best,
    )
