"""A click model with embedding tables (DLRM): Naumov et al., "Deep Learning Recommendation Model
for Personalization and Recommendation Systems" (2019). An MLP processes the pairwise dot products
of the vectors of the IDs and of the dense features."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypedDict, cast

import torch
from pydantic import JsonValue
from torch import nn
from torch.nn import functional

from paceline.config.schema import Config
from paceline.core.errors import ConfigError
from paceline.core.files import write_json_atomic
from paceline.distributed.seeds import derive_seed
from paceline.models.json_config import read_object

DLRM = "builtin:dlrm"
_FORMAT = "paceline-recommender"
_BLOCK_ROWS = 4096
_FILE_BYTES = 128 << 20


class RowSource(Protocol):
    """The source of the rows of a table whose rows are in other processes."""

    def fetch(self, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to fetch the rows ``ids`` (int64 [n], without duplicates).

        Returns:
            A function that waits for the rows and returns them, float32 [n, dim].
        """


class Table(nn.Module):
    """An embedding table.

    If its rows are in other processes, ``weight`` is on the meta device and ``source`` fetches the
    rows of a batch. The initial values depend only on the table's seed and the row (uniform in
    ±1/sqrt(rows), as in the paper's code), so any process can create any range of rows.
    """

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self.rows = rows
        self.dim = dim
        # Drawn even if the table has no values, so that the initial weights of the following layers
        # do not change.
        self.seed = int(torch.randint(0, 2**62, (), device="cpu"))
        device = torch.device("meta") if _without_values else torch.get_default_device()
        self.weight = nn.Parameter(torch.empty(rows, dim, device=device))
        self.source: RowSource | None = None
        # Files that contain the rows of a trained table: (file, name, first row, number of rows).
        self.files: list[tuple[Path, str, int, int]] = []
        if device.type != "meta":
            self.fill(self.weight, 0)

    @torch.no_grad()
    def fill(self, target: torch.Tensor, start: int) -> None:
        """Write the initial values of the rows that begin at ``start`` to ``target`` [n, dim]."""
        if not self.files:
            fill_rows(target, self.seed, self.rows, start)
            return
        from safetensors import safe_open

        end = start + len(target)
        for file, name, first, rows in self.files:
            low, high = max(first, start), min(first + rows, end)
            if low < high:
                with safe_open(str(file), framework="pt") as opened:
                    target[low - start : high - start] = opened.get_slice(name)[
                        low - first : high - first
                    ]

    def fetch(self, ids: torch.Tensor) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        """Start to fetch the rows of ``ids`` (int64 [n]).

        Returns:
            A function that waits for the rows and returns (distinct rows, index of each id among
                them).
        """
        if self.source is None:
            return lambda: (self.weight, ids)
        distinct, positions = torch.unique(ids, return_inverse=True)
        wait = self.source.fetch(distinct)
        return lambda: (wait(), positions)

    def forward(
        self, fetched: Callable[[], tuple[torch.Tensor, torch.Tensor]], starts: torch.Tensor
    ) -> torch.Tensor:
        """Return the sum of each bag's rows, [num_bags, dim]. ``starts`` is int64 [num_bags +
        1]."""
        vectors, positions = fetched()
        return functional.embedding_bag(
            positions, vectors, starts, mode="sum", include_last_offset=True
        )


_without_values = False


@contextmanager
def tables_without_values() -> Iterator[None]:
    """Create tables on the meta device within the block."""
    global _without_values
    before, _without_values = _without_values, True
    try:
        yield
    finally:
        _without_values = before


def named_tables(model: nn.Module) -> dict[str, Table]:
    """Return the tables of a model by parameter name."""
    return {
        f"{name}.weight": module
        for name, module in model.named_modules()
        if isinstance(module, Table)
    }


def move_dense(model: nn.Module, device: torch.device) -> None:
    """Move everything except the tables to ``device``."""
    for module in model.modules():
        if not isinstance(module, Table):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(device)
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(device))


def fill_rows(target: torch.Tensor, seed: int, rows: int, start: int) -> None:
    """Write the initial values of the rows that begin at ``start``, of a table with ``rows`` rows,
    to ``target`` [n, dim]. Each block of rows has a separate random state."""
    bound, dim = 1.0 / math.sqrt(rows), target.shape[1]
    end = start + target.shape[0]
    for block in range(start // _BLOCK_ROWS, math.ceil(end / _BLOCK_ROWS)):
        first = block * _BLOCK_ROWS
        generator = torch.Generator().manual_seed(derive_seed(seed, "rows", block))
        values = torch.empty(_BLOCK_ROWS, dim).uniform_(-bound, bound, generator=generator)
        low, high = max(first, start), min(first + _BLOCK_ROWS, end)
        target[low - start : high - start] = values[low - first : high - first]


class ClickModelArgs(TypedDict):
    """Arguments of :class:`ClickModel`."""

    num_dense: int
    tables: list[int]
    dim: int
    bottom: list[int]
    top: list[int]


class _SavedClickModel(TypedDict):
    """The config.json of a saved click model."""

    args: ClickModelArgs
    tables: dict[str, list[tuple[str, int, int]]]  # name → (file, first row, rows)
    form: dict[str, JsonValue]


class ClickModel(nn.Module):
    """Computes the logit of a click [N] from (dense [N, D], ids, starts), where ``ids`` and
    ``starts`` have one tensor per table."""

    def __init__(
        self,
        num_dense: int,
        tables: Sequence[int],
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
    ) -> None:
        super().__init__()
        self.tables = nn.ModuleList(Table(rows, dim) for rows in tables)
        self.bottom = _layers([num_dense, *bottom, dim], last=True) if num_dense else None
        vectors = len(tables) + (1 if num_dense else 0)
        pairs = torch.triu_indices(vectors, vectors, offset=1, device="cpu")
        self.pairs = (pairs[0].tolist(), pairs[1].tolist())
        width = len(self.pairs[0]) + vectors * dim
        self.top = _layers([width, *top, 1])

    def forward(
        self, dense: torch.Tensor, ids: Sequence[torch.Tensor], starts: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        fetched = [table.fetch(column) for table, column in zip(self.tables, ids, strict=True)]  # type: ignore[operator]
        vectors = [] if self.bottom is None else [self.bottom(dense)]
        vectors += [
            table(rows, begin)
            for table, rows, begin in zip(self.tables, fetched, starts, strict=True)
        ]
        # [N, vectors, dim]
        stacked = torch.stack([vector.to(vectors[0].dtype) for vector in vectors], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        # The vectors are inputs in addition to their products, so that an ID can have an effect by
        # itself.
        scores: torch.Tensor = self.top(torch.cat([stacked.flatten(1), dots], dim=1))
        return scores.squeeze(1)


def _layers(widths: Sequence[int], last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(inputs, outputs))
        if last or number < len(widths) - 2:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


# -- building, saving and loading
# -----------------------------------------------------------------------------------------
def model_args(config: Config, num_dense: int, tables: Sequence[int]) -> ClickModelArgs:
    """Return the arguments of :class:`ClickModel` for a config."""
    return {
        "num_dense": num_dense,
        "tables": list(tables),
        "dim": config.recommend.embedding_dim,
        "bottom": config.recommend.bottom_mlp,
        "top": config.recommend.top_mlp,
    }


def check_click_model(name: str) -> None:
    """Raise ConfigError if ``model`` is not a click model."""
    if name == DLRM or _spec(Path(name).expanduser()) is not None:
        return
    raise ConfigError(
        "`model: {name}` is not a click model",
        code="not-a-click-model",
        allowed="{dlrm}, or the `model` folder of a run of `task: recommend`",
        name=name,
        dlrm=DLRM,
    )


def build_click_model(name: str, args: ClickModelArgs) -> ClickModel:
    """Build the model that ``model`` names, with initial weights or with those in the ``model``
    folder of a run.

    Raises:
        ConfigError: the model in the folder has other arguments.
    """
    model = ClickModel(**args)
    if name == DLRM:
        return model
    folder = Path(name).expanduser()
    spec = _spec(folder)
    if spec is None or spec["args"] != args:
        raise ConfigError(
            "`model: {name}` does not match `recommend` and the data: its arguments are {spec},"
            " expected {args}",
            code="mismatched-model",
            fix="use the `recommend` section and the data of that run, or `model: {dlrm}`",
            name=name,
            spec=spec and spec["args"],
            args=args,
            dlrm=DLRM,
        )
    _fill(model, folder, spec)
    return model


def save_click_model(
    folder: Path,
    args: ClickModelArgs,
    form: dict[str, JsonValue],
    dense: dict[str, torch.Tensor],
    tables: Iterable[tuple[str, int, Callable[[int, int], torch.Tensor]]],
) -> None:
    """Write a model that :func:`load_recommender` can load.

    Each table is written to several files, each with a range of rows, so that no process needs
    memory for all rows.

    Args:
        form: description of the model's inputs, such as the columns and their scale.
        dense: all weights except the tables, by name.
        tables: (name, number of rows, function that returns the rows [begin, end)) of each table.
    """
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().contiguous().cpu() for name, tensor in dense.items()},
        str(folder / "model.safetensors"),
    )
    files: dict[str, list[tuple[str, int, int]]] = {}
    for number, (name, rows, read) in enumerate(tables):
        step = max(1, _FILE_BYTES // (4 * args["dim"]))
        for part, start in enumerate(range(0, rows, step)):
            file = f"table-{number:03d}-{part:05d}.safetensors"
            values = read(start, min(start + step, rows)).detach().contiguous().cpu()
            save_file({name: values.clone()}, str(folder / file))
            files.setdefault(name, []).append((file, start, len(values)))
    write_json_atomic(
        folder / "config.json",
        {"format": _FORMAT, "model": DLRM, "args": args, "tables": files, "form": form},
    )


def load_recommender(folder: str | Path) -> tuple[ClickModel, dict[str, JsonValue]]:
    """Load a trained click model.

    Returns:
        The model, in evaluation mode on the CPU, and the description of its inputs.

    Raises:
        ConfigError: the folder does not contain a click model.
    """
    folder = Path(folder).expanduser()
    spec = _spec(folder)
    if spec is None:
        raise ConfigError(
            "{folder} does not contain a click model",
            code="no-click-model",
            allowed="the `model` folder of a run of `task: recommend`",
            folder=folder,
        )
    model = ClickModel(**spec["args"])
    _fill(model, folder, spec)
    return model.eval(), spec["form"]


def _fill(model: ClickModel, folder: Path, spec: _SavedClickModel) -> None:
    from safetensors.torch import load_file

    with torch.no_grad():
        for name, value in load_file(str(folder / "model.safetensors")).items():
            model.get_parameter(name).copy_(value)
    for name, table in named_tables(model).items():
        table.files = [
            (folder / file, name, start, rows) for file, start, rows in spec["tables"][name]
        ]
        if table.weight.device.type != "meta":
            table.fill(table.weight, 0)


def _spec(folder: Path) -> _SavedClickModel | None:
    """Return the config.json of a folder that this module wrote, or None for any other folder."""
    content = read_object(folder / "config.json") or {}
    return cast(_SavedClickModel, content) if content.get("format") == _FORMAT else None
