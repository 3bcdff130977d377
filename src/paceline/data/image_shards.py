"""Labeled images: where they are; and those in tar shards (WebDataset)."""

from __future__ import annotations

import glob
import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from paceline.config.schema.data import DatasetSource
from paceline.core.errors import ConfigError
from paceline.core.log import Notice
from paceline.core.texts import UserText
from paceline.data.cache import key_of
from paceline.data.sources.folder import DataFolder, LocalFolder
from paceline.data.sources.opening import expand_braces, is_url
from paceline.data.sources.splits import choose_files, for_validation, split_of_file
from paceline.data.sources.tar import TarFile, TarSample, is_tar, sample_class, tar_samples
from paceline.data.streaming.remote import RemoteFolder, fetch, find_remote

#: Number of bytes from which Pillow's plugins recognize an image.
_HEAD_BYTES = 16


@dataclass
class ImageIndex:
    """The locations and classes of the images of one source, without pixels. Small and picklable.

    Args:
        source: DIGITS, or the folder of the images or tar shards as an absolute path.
        names: each image's path below the folder (for those in tar shards:
            :attr:`TarFile.path`); None for the digits.
        rows: for the digits, each image's row in scikit-learn's table; None for others.
        labels: index of each image's class, int64 [num_images].
        classes: names of the classes, by index.
        dropped: number of skipped files, by reason.
        notices: messages to log.
        sizes: each image's size in bytes; None for the digits.
    """

    source: str
    names: list[str] | None
    rows: np.ndarray | None
    labels: np.ndarray
    classes: list[str]
    dropped: dict[str, int] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    sizes: list[int] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> ImageIndex:
        """Return the images at ``indices`` (int64), without counts and messages."""
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
        """Return a key of the images' names, sizes in bytes, order and classes."""
        rows = None if self.rows is None else self.rows.tolist()
        source = self.source if self.names is None else "folder"  # a folder may move
        return key_of([source, self.names, self.sizes, rows, self.labels.tolist(), self.classes])


def names_shards(name: str) -> bool:
    """Return whether a dataset is a tar shard, a pattern of shards, a URL, or a folder with shards
    and without subfolders."""
    if is_tar(name) or is_url(name):
        return True
    path = Path(name).expanduser()
    if not path.is_dir():
        return False
    entries = list(path.iterdir())
    return any(map(_is_shard, entries)) and not any(entry.is_dir() for entry in entries)


def open_image_shards(name: str, validation: bool = False) -> ImageIndex:
    """Find the images of tar shards and their classes. Shards at a URL are downloaded.

    Args:
        validation: whether the images are for validation: of a folder with shards of a held-out
            split, these are used.

    Raises:
        ConfigError: there are no shards, one is damaged, or no image has a class.
    """
    shards, notices = _find_shards(name, validation)
    source = os.path.commonpath([shard.parent for shard in shards])
    names: list[str] = []
    sizes: list[int] = []
    class_names: list[str] = []
    dropped: Counter[str] = Counter()
    for shard in shards:
        folder = Path(os.path.relpath(shard.parent, source))
        for sample in tar_samples(shard):
            image = _image(sample)
            if not isinstance(image, TarFile):
                dropped[image] += 1
            elif (class_name := sample_class(sample)) is None:
                dropped["image without a class"] += 1
            else:
                names.append(str(folder / Path(image.path).relative_to(shard.parent)))
                sizes.append(image.size)
                class_names.append(class_name)
    if not names:
        raise ConfigError(
            "`{name}` has no images with classes ({reasons_of})",
            code="no-images-in-shards",
            allowed="samples of an image and a file with its class, e.g. 0001.jpg and 0001.cls, or"
            " a JSON file with the key `label`",
            name=name,
            reasons_of=reasons_of(dropped),
        )
    classes = sorted(set(class_names), key=_class_order)
    number = {class_name: index for index, class_name in enumerate(classes)}
    labels = np.array([number[class_name] for class_name in class_names], dtype=np.int64)
    notices.append(
        Notice(
            "info",
            UserText(
                "{name}: {num_shards:tar shard}",
                code="tar-shards",
                name=name,
                num_shards=len(shards),
            ),
        )
    )
    return ImageIndex(source, names, None, labels, classes, dict(dropped), notices, sizes)


def reasons_of(dropped: Counter[str]) -> str:
    """Return why files were skipped, for messages."""
    reasons = "; ".join(f"{reason}: {count:,}" for reason, count in dropped.most_common())
    return reasons or "no files"


def _find_shards(name: str, validation: bool) -> tuple[list[Path], list[Notice]]:
    """Return the local paths of the shards, in the order of their names, and messages about shards
    of other splits."""
    shards: list[Path] = []
    notices: list[Notice] = []
    for pattern in expand_braces(name):
        if is_url(pattern):
            urls = find_remote(pattern, _is_shard)
            if isinstance(urls, RemoteFolder):
                names, split_notices = _shards_of_split(urls, validation)
                urls = list(map(urls.url, names))
                notices += split_notices
            matches = [fetch(url) for url in urls]
        elif (path := Path(pattern).expanduser()).is_dir():
            names, split_notices = _shards_of_split(LocalFolder(path), validation)
            matches = [path / name for name in names]
            notices += split_notices
        else:
            matches = sorted([path] if path.is_file() else map(Path, glob.glob(str(path))))
        if not matches:
            raise ConfigError(
                "`{pattern}` does not exist",
                code="missing-shards",
                fix="check the path of the tar shards",
                pattern=pattern,
            )
        shards += matches
    return [shard.absolute() for shard in shards], notices


def _shards_of_split(folder: DataFolder, validation: bool) -> tuple[list[str], list[Notice]]:
    """Return the names of the training shards of a folder, or of its held-out ones for validation
    if it has some, and messages about the others."""
    names = [name for name in folder.names() if _is_shard(Path(name))]
    if not names:
        raise ConfigError(
            "`{folder}` has no tar shards",
            code="no-tar-shards",
            fix="check the path of the tar shards",
            folder=folder.label,
        )
    spec = DatasetSource(path=folder.label)
    if validation:
        spec = for_validation(spec, map(split_of_file, names))
    return choose_files(names, spec, folder.label)


def _is_shard(path: Path) -> bool:
    return is_tar(path.name) and not path.name.startswith(".")


def _image(sample: TarSample) -> TarFile | str:
    """Return the image of a sample, or why it cannot be used."""
    images = sample.images()
    if not images:
        return "no image"
    if len(images) > 1:
        return "several images"
    if not images[0].size:
        return "empty file"
    return images[0] if _is_image(images[0].read(_HEAD_BYTES)) else "not an image"


def _is_image(head: bytes) -> bool:
    """Return whether a plugin of Pillow recognizes the first bytes of a file."""
    from PIL import Image

    Image.init()
    head = head.ljust(_HEAD_BYTES, b"\0")  # plugins expect at least some bytes
    return any(accept is not None and accept(head) is True for _, accept in Image.OPEN.values())


def _class_order(name: str) -> tuple[bool, int, str]:
    """Sort numbers by their value, before other names."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
