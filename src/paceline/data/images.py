"""Image datasets: scikit-learn's digits, folders with one subfolder per class, and tar shards."""

from __future__ import annotations

import gzip
import importlib.util
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import ConfigError, RunError, did_you_mean, first_line
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.image_shards import ImageIndex, names_shards, open_image_shards, reasons_of
from paceline.data.pixels import decode_rgb, open_image
from paceline.data.sources.opening import number_to_take, similar_path, take_count
from paceline.data.sources.splits import SPLITS
from paceline.distributed.seeds import derive_seed

if TYPE_CHECKING:
    import torch

DIGITS = "builtin:digits"
_ALLOWED = (
    f"{DIGITS}, a folder with one subfolder of images per class, or tar shards (WebDataset); each"
    " also as path#N for N images"
)


@dataclass(frozen=True)
class ImageForm:
    """The input format of a model: images float32 [channels, height, width], computed as ``(x -
    mean) / std`` from pixels in [0, 1].

    If ``height`` and ``width`` are None, images keep their size (8 × 8 for the digits).
    """

    channels: int
    height: int | None = None
    width: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


def open_images(path: str, seed: int, *, validation: bool = False) -> ImageIndex:
    """Find the images of a dataset. Reads names and the header of each file, but no pixels.

    Args:
        path: ``builtin:digits``, a folder or tar shards; with ``#N`` or ``#P%``, the first
            images of a shuffle that depends only on ``seed``.
        validation: as in :func:`open_image_shards`.

    Raises:
        ConfigError: the folder or a shard does not exist, or has no classes or readable images.
    """
    name, take = take_count(path, "images")
    if name.startswith("builtin:"):
        if name != DIGITS:
            raise ConfigError(
                "`dataset: {name}` has no images",
                code="unknown-image-dataset",
                allowed=_ALLOWED,
                fix=did_you_mean(name, [DIGITS]),
                name=name,
            )
        _, digits = _digits_table()
        classes = [str(digit) for digit in range(10)]
        index = ImageIndex(DIGITS, None, np.arange(len(digits)), digits, classes)
    elif names_shards(name):
        index = open_image_shards(name, validation)
    else:
        index = _folder_index(Path(name).expanduser())
    if take is None:
        return index
    count, notices = number_to_take(take, len(index)), index.notices
    if count > len(index):
        text = UserText(
            "{path}: the dataset has {num_index} images; using all of them",
            code="fewer-images-than-requested",
            path=path,
            num_index=f"{len(index):,}",
        )
        notices = [*notices, Notice("warning", text)]
    chosen = np.random.default_rng(derive_seed(seed, "take")).permutation(len(index))[:count]
    return replace(index.take(np.sort(chosen)), dropped=index.dropped, notices=notices)


def _digits_table() -> tuple[np.ndarray, np.ndarray]:
    """Return (pixels float32 [1797, 1, 8, 8] in [0, 1], digits int64 [1797]). Avoids the slow
    import of scikit-learn if possible."""
    spec = importlib.util.find_spec("sklearn")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    for folder in folders:
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            with gzip.open(file, "rt") as handle:
                table = np.loadtxt(handle, delimiter=",", dtype=np.float32)
            return table[:, :-1].reshape(-1, 1, 8, 8) / 16.0, table[:, -1].astype(np.int64)
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    pixels, digits = load_digits(return_X_y=True)
    return (pixels.reshape(-1, 1, 8, 8) / 16.0).astype(np.float32), digits.astype(np.int64)


def _folder_index(folder: Path) -> ImageIndex:
    if not folder.is_dir():
        fix = "set the folder of the images"
        raise ConfigError(
            "`{folder}` is a file" if folder.exists() else "`{folder}` does not exist",
            code="missing-image-folder",
            allowed=_ALLOWED,
            fix=fix if folder.exists() else similar_path(folder, fix),
            folder=folder,
        )
    entries = sorted(folder.iterdir())
    subfolders = [
        path for path in entries if path.is_dir() and not path.name.startswith((".", "__"))
    ]
    if not subfolders:
        shown = ", ".join(path.name for path in entries[:5]) or "nothing"
        raise ConfigError(
            "the folder `{folder}` has no class subfolders (found: {shown})",
            code="no-classes",
            allowed="one subfolder per class, e.g. animals/cat/1.png and animals/dog/1.png",
            fix="move the images of each class to a folder with the name of the class",
            folder=folder,
            shown=shown,
        )
    _check_not_splits(folder, subfolders)
    names: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    classes: list[str] = []
    dropped: Counter[str] = Counter()
    notices: list[Notice] = []
    num_loose = sum(path.is_file() and not path.name.startswith(".") for path in entries)
    if num_loose:
        dropped["in no class folder"] = num_loose
    for subfolder in subfolders:
        before = len(names)
        for file in sorted(path for path in subfolder.rglob("*") if path.is_file()):
            reason = _read_problem(file)
            if reason is not None:
                dropped[reason] += 1
                continue
            names.append(file.relative_to(folder).as_posix())
            labels.append(len(classes))
            sizes.append(file.stat().st_size)
        if len(names) > before:
            classes.append(subfolder.name)
        else:
            text = UserText(
                "{folder}: skipped `{subfolder}`, which has no readable images",
                code="image-folder-skipped",
                folder=folder,
                subfolder=subfolder.name,
            )
            notices.append(Notice("warning", text))
    if not names:
        raise ConfigError(
            "the folder `{folder}` has no readable images in its subfolders ({reasons_of})",
            code="no-readable-images",
            allowed=_ALLOWED,
            folder=folder,
            reasons_of=reasons_of(dropped),
        )
    numbers = np.array(labels, dtype=np.int64)
    source = str(folder.resolve())
    return ImageIndex(source, names, None, numbers, classes, dict(dropped), notices, sizes)


def _check_not_splits(folder: Path, subfolders: list[Path]) -> None:
    """Raise ConfigError if the subfolders are splits, which contain the class folders."""
    split_names = set().union(*SPLITS.values())
    if not all(
        path.name.lower() in split_names and any(entry.is_dir() for entry in path.iterdir())
        for path in subfolders
    ):
        return

    def find(prefixes: tuple[str, ...], paths: list[Path]) -> Path | None:
        matches = (path for path in paths if path.name.lower().startswith(prefixes))
        return next(matches, paths[0] if paths else None)

    train = find(("train",), subfolders)
    validation = find(("val", "dev"), [path for path in subfolders if path != train])
    names = ", ".join(path.name for path in subfolders)
    raise ConfigError(
        "the folder `{folder}` contains splits ({names}), not classes",
        code="splits-instead-of-classes",
        fix="set `dataset: {train}` and `val_dataset: {validation}`"
        if validation
        else "set `dataset: {train}`",
        folder=folder,
        names=names,
        train=train,
        validation=validation,
    )


def _read_problem(file: Path) -> str | None:
    """Return why a file is not a readable image, judged by its header, or None."""
    from PIL import Image, UnidentifiedImageError

    if file.stat().st_size == 0:
        return "empty file"
    try:
        with Image.open(file):
            return None
    except UnidentifiedImageError:
        return "not an image"
    except Image.DecompressionBombError:
        return "image with too many pixels"
    except PermissionError:
        return "permission denied"
    except (OSError, ValueError, SyntaxError):  # raised by Pillow's plugins for corrupt headers
        return "corrupt image"


class ImageDataset:
    """Map-style dataset of samples (image float32 [channels, height, width], class int64 []).

    Augmentation (a shift by up to an eighth of each side; for folders also a horizontal flip) uses
    torch's global generator, which the loader seeds for each (seed, epoch, sample).
    """

    def __init__(self, index: ImageIndex, form: ImageForm, augment: bool = False) -> None:
        self.index = index
        self.form = form
        self.augment = augment
        self.deterministic = not augment  # the loader does not need to seed
        self.pixels = None if index.rows is None else _digits_table()[0][index.rows]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        if self.index.names is not None:
            image = read_image(Path(self.index.source) / self.index.names[index], self.form)
        else:
            image = self._digit(index)
        if self.augment:
            image = _shift(image)
            # Digits are not flipped, because a mirrored digit is not a digit.
            if self.pixels is None and bool(torch.rand(()) < 0.5):
                image = image.flip(-1)
        if self.form.mean is not None and self.form.std is not None:
            mean, std = torch.tensor(self.form.mean), torch.tensor(self.form.std)
            image = (image - mean.view(-1, 1, 1)) / std.view(-1, 1, 1)
        return image, torch.tensor(int(self.index.labels[index]))

    def _digit(self, index: int) -> torch.Tensor:
        import torch
        from torch.nn import functional

        assert self.pixels is not None
        image = torch.from_numpy(self.pixels[index])
        if self.form.height is not None and self.form.width is not None:
            size = (self.form.height, self.form.width)
            image = functional.interpolate(
                image.unsqueeze(0), size=size, mode="bilinear", align_corners=False
            )[0]
        return image.expand(self.form.channels, -1, -1)


def read_image(file: Path, form: ImageForm) -> torch.Tensor:
    """Read an image as float32 [channels, height, width] in [0, 1], resized to the form's size
    (bilinear). Pixels are converted as :func:`decode_rgb` does.

    Args:
        file: its path, or :attr:`~paceline.data.sources.tar.TarFile.path`.

    Raises:
        RunError: the file cannot be decoded.
    """
    import torch
    from PIL import Image

    try:
        with open_image(str(file)) as opened:
            image: Any = decode_rgb(opened)
            if form.channels == 1:
                image = image.convert("L")
    except (OSError, ValueError, SyntaxError) as error:
        raise RunError(
            "the image {file} has a valid header but cannot be decoded: {reason}",
            code="image-not-decodable",
            fix="delete or replace the file, and run the command again",
            file=file,
            reason=first_line(error),
        ) from error
    if form.height is not None and form.width is not None:
        image = image.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def _shift(image: torch.Tensor) -> torch.Tensor:
    """Shift an image by up to an eighth of each side, and fill the gap with its edge."""
    import torch
    from torch.nn import functional

    height, width = image.shape[-2:]
    max_y, max_x = max(1, height // 8), max(1, width // 8)
    down = int(torch.randint(0, 2 * max_y + 1, ()))
    right = int(torch.randint(0, 2 * max_x + 1, ()))
    padded = functional.pad(image.unsqueeze(0), (max_x, max_x, max_y, max_y), mode="replicate")
    return padded[0, :, down : down + height, right : right + width]
