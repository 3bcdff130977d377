"""Images and their classes: scikit-learn's digits, and folders with one subfolder a class."""

from __future__ import annotations

import gzip
import importlib.util
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.core.errors import ConfigError, RunError, did_you_mean
from paceline.data.cache import key_of
from paceline.data.sources.opening import take_count
from paceline.distributed.seeds import derive_seed

if TYPE_CHECKING:
    import torch

DIGITS = "builtin:digits"
_ALLOWED = (
    f"{DIGITS}, or a folder with one subfolder of images a class; either as path#N for N images"
)
_SPLIT_WORDS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}


@dataclass(frozen=True)
class ImageForm:
    """What a model takes: images float32 [channels, height, width], ``(x - mean) / std`` of pixels
    in [0, 1].

    ``height`` and ``width`` None keep the images' own size (digits: 8 by 8).
    """

    channels: int
    height: int | None = None
    width: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass
class ImageIndex:
    """Where the images of one source are and what they show; the pixels are read later. Small and
    picklable.

    Args:
        source: DIGITS, or the folder as an absolute path.
        names: for a folder, each image's path below it; None for the digits.
        rows: for the digits, each image's row in scikit-learn's table; None for a folder.
        labels: number of each image's class, int64 [num_images].
        classes: names of the classes, in order of their number.
        dropped: files that were left out, counted by reason.
        notices: lines for the person, as (level, text).
        sizes: for a folder, each file's size in bytes.
    """

    source: str
    names: list[str] | None
    rows: np.ndarray | None
    labels: np.ndarray
    classes: list[str]
    dropped: dict[str, int] = field(default_factory=dict)
    notices: list[tuple[str, str]] = field(default_factory=list)
    sizes: list[int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> ImageIndex:
        """The images at ``indices`` (int64), with nothing dropped."""
        return replace(
            self,
            names=None if self.names is None else [self.names[index] for index in indices],
            rows=None if self.rows is None else self.rows[indices],
            sizes=None if self.sizes is None else [self.sizes[index] for index in indices],
            labels=self.labels[indices],
            dropped={},
            notices=[],
        )

    def fingerprint(self) -> str:
        """Changes with the images' names, sizes in bytes, order or classes."""
        rows = None if self.rows is None else self.rows.tolist()
        source = self.source if self.names is None else "folder"  # a folder may move
        return key_of([source, self.names, self.sizes, rows, self.labels.tolist(), self.classes])


def open_images(given: str, seed: int) -> ImageIndex:
    """Find the images that ``given`` names: read a folder's names and every file's header, no
    pixels.

    Args:
        given: ``builtin:digits`` or a folder, with ``#N`` for the first N of a shuffle that
            ``seed`` fixes.

    Raises:
        ConfigError: no such folder, no class subfolders, one class only, or no readable image.
    """
    name, count = take_count(given, "images")
    if name.startswith("builtin:"):
        if name != DIGITS:
            raise ConfigError(
                f"`dataset: {name}` has no images",
                allowed=_ALLOWED,
                fix=did_you_mean(name, [DIGITS]),
            )
        _, digits = _digits_table()
        classes = [str(digit) for digit in range(10)]
        index = ImageIndex(DIGITS, None, np.arange(len(digits)), digits, classes)
    else:
        index = _folder_index(Path(name).expanduser())
    if count is None:
        return index
    notices = index.notices
    if count > len(index):
        notices = [*notices, ("warning", f"{given}: it has {len(index):,} images; all are used")]
    chosen = np.random.default_rng(derive_seed(seed, "take")).permutation(len(index))[:count]
    return replace(index.take(np.sort(chosen)), dropped=index.dropped, notices=notices)


# -- digits
def _digits_table() -> tuple[np.ndarray, np.ndarray]:
    """(pixels float32 [1797, 1, 8, 8] in [0, 1], digits int64 [1797]), read without importing
    scikit-learn, which is slow."""
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


# -- folders
def _folder_index(folder: Path) -> ImageIndex:
    if not folder.is_dir():
        fix = "give the folder of the images"
        if folder.parent.is_dir() and not folder.exists():
            siblings = [path.name for path in folder.parent.iterdir()]
            fix = did_you_mean(folder.name, siblings, fix, f"`{folder.parent / '{}'}`")
        raise ConfigError(
            f"`{folder}` is {'a file' if folder.exists() else 'not there'}",
            allowed=_ALLOWED,
            fix=fix,
        )
    subfolders = sorted(
        one for one in folder.iterdir() if one.is_dir() and not one.name.startswith((".", "__"))
    )
    if not subfolders:
        found = ", ".join(sorted(one.name for one in folder.iterdir())[:5]) or "nothing"
        raise ConfigError(
            f"the folder `{folder}` has no class subfolders (found: {found})",
            allowed="one subfolder a class, e.g. animals/cat/1.png and animals/dog/1.png",
            fix="put each class's images into a folder of that name",
        )
    _refuse_splits(folder, subfolders)
    names: list[str] = []
    labels: list[int] = []
    sizes: list[int] = []
    classes: list[str] = []
    dropped: Counter[str] = Counter()
    notices: list[tuple[str, str]] = []
    loose = sum(1 for one in folder.iterdir() if one.is_file() and not one.name.startswith("."))
    if loose:
        dropped["in no class folder"] += loose
    for subfolder in subfolders:
        before = len(names)
        for file in sorted(one for one in subfolder.rglob("*") if one.is_file()):
            reason = _unreadable(file)
            if reason is not None:
                dropped[reason] += 1
                continue
            names.append(file.relative_to(folder).as_posix())
            labels.append(len(classes))
            sizes.append(file.stat().st_size)
        if len(names) > before:
            classes.append(subfolder.name)
        else:
            notices.append(
                ("warning", f"{folder}: `{subfolder.name}` holds no readable image and is no class")
            )
    index = ImageIndex(
        str(folder.resolve()),
        names,
        None,
        np.array(labels, dtype=np.int64),
        classes,
        dict(dropped),
        notices,
        sizes,
    )
    if not names:
        reasons = (
            "; ".join(f"{reason}: {number:,}" for reason, number in dropped.most_common())
            or "there are no files"
        )
        raise ConfigError(
            f"the folder `{folder}` has no readable image in its subfolders ({reasons})",
            allowed=_ALLOWED,
        )
    return index


def _refuse_splits(folder: Path, subfolders: list[Path]) -> None:
    by_word = {one.name: one for one in subfolders if one.name.lower() in _SPLIT_WORDS}
    if len(by_word) < len(subfolders) or not all(
        any(deep.is_dir() for deep in one.iterdir()) for one in subfolders
    ):
        return
    train = next(
        (one for name, one in by_word.items() if name.lower().startswith("train")), subfolders[0]
    )
    rest = [one for one in subfolders if one != train]
    other = next(
        (one for one in rest if one.name.lower().startswith(("val", "dev"))),
        rest[0] if rest else None,
    )
    raise ConfigError(
        f"the folder `{folder}` holds splits ({', '.join(sorted(by_word))}), not classes",
        fix=f"set `dataset: {train}`" + (f" and `val_dataset: {other}`" if other else ""),
    )


def _unreadable(file: Path) -> str | None:
    """Why this file is no image that can be read, by its header alone; None where it can."""
    from PIL import Image, UnidentifiedImageError

    if file.stat().st_size == 0:
        return "empty file"
    try:
        with Image.open(file):
            return None
    except UnidentifiedImageError:
        return "not an image"
    except Image.DecompressionBombError:
        return "image of too many pixels"
    except PermissionError:
        return "no permission to read"
    except (OSError, ValueError, SyntaxError):  # what Pillow's plugins raise on broken headers
        return "broken image"


# -- samples
class ImageDataset:
    """Samples (image float32 [channels, height, width], class int64 []), looked up by number.

    Augmentation (a shift by up to an eighth of each side; for folders a flip left to right too)
    draws from torch's global generator, which the loader sets for each (seed, epoch, sample).
    """

    def __init__(self, index: ImageIndex, form: ImageForm, augment: bool = False) -> None:
        self.index = index
        self.form = form
        self.augment = augment
        self.deterministic = not augment  # spares the loader the seeding
        self.pixels = None if index.rows is None else _digits_table()[0][index.rows]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        image = self._file(number) if self.pixels is None else self._digit(number)
        if self.augment:
            image = _shift(image)
            # a digit in a mirror is no digit
            if self.pixels is None and bool(torch.rand(()) < 0.5):
                image = image.flip(-1)
        if self.form.mean is not None and self.form.std is not None:
            image = (image - torch.tensor(self.form.mean).view(-1, 1, 1)) / torch.tensor(
                self.form.std
            ).view(-1, 1, 1)
        return image, torch.tensor(int(self.index.labels[number]))

    def _digit(self, number: int) -> torch.Tensor:
        import torch
        from torch.nn import functional

        assert self.pixels is not None
        image = torch.from_numpy(self.pixels[number])
        if self.form.height is not None and self.form.width is not None:
            size = (self.form.height, self.form.width)
            image = functional.interpolate(
                image.unsqueeze(0), size=size, mode="bilinear", align_corners=False
            )[0]
        return image.expand(self.form.channels, -1, -1)

    def _file(self, number: int) -> torch.Tensor:
        assert self.index.names is not None
        return read_image(Path(self.index.source) / self.index.names[number], self.form)


def read_image(file: Path, form: ImageForm) -> torch.Tensor:
    """An image file as float32 [channels, height, width] in [0, 1], resized to the form's size
    (bilinear).

    Raises:
        RunError: the file cannot be decoded.
    """
    import torch
    from PIL import Image, ImageOps

    try:
        with Image.open(file) as opened:
            image: Any = ImageOps.exif_transpose(opened).convert(
                "RGB" if form.channels == 3 else "L"
            )
    except (OSError, ValueError, SyntaxError) as error:
        raise RunError(
            f"the image {file} has a good header and cannot be decoded:"
            f" {str(error) or type(error).__name__}",
            fix="delete or replace that file, and start the command again",
        ) from error
    if form.height is not None and form.width is not None:
        image = image.resize((form.width, form.height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255.0)
    return pixels.unsqueeze(0) if pixels.dim() == 2 else pixels.permute(2, 0, 1).contiguous()


def _shift(image: torch.Tensor) -> torch.Tensor:
    """Move by up to an eighth of each side; what comes in is a copy of the edge."""
    import torch
    from torch.nn import functional

    height, width = image.shape[-2:]
    most_y, most_x = max(1, height // 8), max(1, width // 8)
    down, right = (
        int(torch.randint(0, 2 * most_y + 1, ())),
        int(torch.randint(0, 2 * most_x + 1, ())),
    )
    padded = functional.pad(image.unsqueeze(0), (most_x, most_x, most_y, most_y), mode="replicate")[
        0
    ]
    return padded[:, down : down + height, right : right + width]
