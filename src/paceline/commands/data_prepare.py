"""`paceline data prepare`: tokenize the data of a config into the cache, ahead of a run."""

import json
import logging
import time
from argparse import Namespace
from typing import TypedDict

from paceline.commands.options import (
    Integer,
    OptionParser,
    add_config,
    load_fitted_config,
    print_notices,
)
from paceline.core.errors import EXIT_DONE
from paceline.core.files import cache_dir
from paceline.core.report import DataFigures

logger = logging.getLogger(__name__)

_MAX_WORKERS = 256


class PrepareResult(TypedDict):
    """The prepared data. Tokens are null if the samples of the task have none. ``cache``: the
    folder that the hosts of the run must share."""

    train_samples: int | None
    eval_samples: int
    train_tokens: int | None
    label_tokens: int | None
    rows: DataFigures
    cache: str
    wall_s: float


def add_arguments(parser: OptionParser) -> None:
    add_config(parser)
    parser.add_option(
        "--workers",
        Integer(1, _MAX_WORKERS),
        "N",
        "number of processes that tokenize; without it, up to one per core for much text",
    )
    parser.example = "paceline data prepare examples/demo.yaml --workers 8"


def run(args: Namespace) -> int:
    """Prepare the data and print its size."""
    from paceline.tasks import load_task

    start = time.perf_counter()
    loaded = load_fitted_config(args)
    task = load_task(loaded.config)
    if args.workers is not None and not task.tokenizes:
        logger.warning("`--workers` has no effect on `task: %s`", loaded.config.task)
    task.num_prepare_workers = args.workers
    data = task.prepare()
    print_notices([*loaded.notices, *data.notices])
    if "tokens" in data.counts.as_dict():
        logger.warning(
            "The training data is streamed, so it is tokenized while the run trains. Set"
            " `streaming: false` to tokenize it ahead."
        )
    result: PrepareResult = {
        "train_samples": data.num_train,
        "eval_samples": data.num_eval,
        "train_tokens": data.train_tokens,
        "label_tokens": data.label_tokens,
        "rows": data.counts.as_dict(),
        "cache": str(cache_dir()),
        "wall_s": time.perf_counter() - start,
    }
    print(json.dumps(result) if args.json else _text(result))
    return EXIT_DONE


def _text(result: PrepareResult) -> str:
    rows, num_train = result["rows"], result["train_samples"]
    dropped = sum(rows["dropped"].values())
    lines = [
        ("training", "streamed" if num_train is None else f"{num_train:,} samples"),
        ("validation", f"{result['eval_samples']:,} samples"),
        (
            "rows",
            f"{rows['read']:,} read, {rows['kept']:,} kept, {rows['truncated'] or 0:,} truncated,"
            f" {dropped:,} dropped",
        ),
        ("cache", result["cache"]),
    ]
    if result["train_tokens"] is not None:
        tokens = f"{result['train_tokens']:,} in training, {result['label_tokens']:,} with loss"
        lines.insert(2, ("tokens", tokens))
    return "\n".join(f"{label:<11} {value}" for label, value in lines)
