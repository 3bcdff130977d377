"""A look at samples that have no tokens: images as a model takes them, rows of a click log with
their ids."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.config.schema import Config

if TYPE_CHECKING:
    import torch

#: Of a row's ids in one column only so many are shown.
_MOST_IDS = 20


def preview_images(config: Config, rows: int) -> dict[str, Any]:
    """Training images spread evenly over the data, so that several classes are among them:
    ``{place, label, shape [channels, height, width], image}``, the last as a `data:` URI, resized
    as the model takes it and without its normalisation."""
    from paceline.data.images import ImageDataset
    from paceline.tasks.classify import ClassifyTask

    task = ClassifyTask(config)
    task.check()
    prepared = task.prepare()
    index, form = prepared.handle.train, prepared.handle.form
    pixels = ImageDataset(index, replace(form, mean=None, std=None))
    found = []
    for number in np.unique(
        np.linspace(0, len(index) - 1, min(rows, len(index))).round().astype(int)
    ).tolist():
        image, label = pixels[number]
        place = (
            index.names[number]
            if index.names is not None
            else f"image {int(index.rows[number])} of {index.source}"
        )
        found.append({
            "place": place, "label": index.classes[int(label)], "shape": list(image.shape),
            "image": _as_uri(image),
        })  # fmt: skip
    return {"task": config.task, "rows": found, "notices": [list(one) for one in prepared.notices]}


def _as_uri(image: torch.Tensor) -> str:
    from PIL import Image

    values = (image.clamp(0, 1) * 255).round().byte()
    picture = Image.fromarray(
        values[0].numpy() if len(values) == 1 else values.permute(1, 2, 0).numpy()
    )
    raw = io.BytesIO()
    picture.save(raw, "PNG")
    return f"data:image/png;base64,{base64.b64encode(raw.getvalue()).decode()}"


def preview_clicks(config: Config, rows: int) -> dict[str, Any]:
    """The first training rows: ``{place, label, fields: [{name, value}]}``; numbers as they are
    scaled for the model, ids by their place in the column's table."""
    from paceline.tasks.recommend import RecommendTask

    task = RecommendTask(config)
    task.check()
    prepared = task.prepare()
    task.prepared = prepared
    log = task.build_datasets()[0]
    places = np.array([log[number].place for number in range(min(rows, len(log)))], dtype=np.int64)
    batch = log.batch(places)
    dense = config.recommend.dense or [
        f"dense {number + 1}" for number in range(batch["dense"].shape[1])
    ]
    found = []
    for row, place in enumerate(places.tolist()):
        fields = [
            {"name": name, "value": f"{batch['dense'][row, at]:.4g}"}
            for at, name in enumerate(dense)
        ]
        for name, size, ids, starts in zip(
            log.names, log.tables, batch["ids"], batch["starts"], strict=True
        ):
            own = ids[starts[row] : starts[row + 1]].tolist()
            more = f" and {len(own) - _MOST_IDS} more" if len(own) > _MOST_IDS else ""
            fields.append(
                {
                    "name": name,
                    "value": f"{', '.join(map(str, own[:_MOST_IDS])) or 'none'}{more} of {size:,}",
                }
            )
        found.append(
            {"place": f"row {place + 1:,}", "label": f"{batch['label'][row]:g}", "fields": fields}
        )
    return {"task": config.task, "rows": found, "notices": [list(one) for one in prepared.notices]}


def samples_as_text(found: dict[str, Any]) -> str:
    """For a terminal."""
    lines = []
    for number, row in enumerate(found["rows"], 1):
        shape = f", {' × '.join(map(str, row['shape']))}" if "shape" in row else ""
        lines.append(f"--- {number}: {row['place']}: label {row['label']}{shape}")
        lines += [f"    {one['name']}: {one['value']}" for one in row.get("fields", ())]
    return "\n".join(lines)
