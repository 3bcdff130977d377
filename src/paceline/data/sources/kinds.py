"""Whether the data of `task: classify` are images or texts. Reads no data and imports no torch."""

from pathlib import Path

from paceline.config.schema import Config
from paceline.data.sources.builtin import LABELED_DATASETS
from paceline.data.sources.opening import is_pattern, is_url, take_count
from paceline.data.sources.readers import is_table, is_text
from paceline.data.sources.tar import IMAGE_SUFFIXES, is_tar


def classifies_images(config: Config) -> bool:
    """Return whether ``dataset`` has images: the digits, tar shards, or a folder with images or
    without data files.

    Files, folders of data files, patterns, hub IDs and built-in datasets of labeled texts have
    texts.
    """
    name, _ = take_count(config.sources()[0].path, "images or texts")
    if name.startswith("builtin:"):
        return name.removeprefix("builtin:") not in LABELED_DATASETS
    if is_tar(name):
        return True
    if is_url(name):
        return not is_table(Path(name))
    path = Path(name).expanduser()
    if path.is_dir():
        return _has_images(path)
    if path.exists():
        return not (is_table(path) or is_text(path))
    if is_pattern(name):
        return False
    # A name that does not exist: a hub ID has one slash.
    return name.startswith((".", "/", "~")) or name.count("/") != 1


def _has_images(folder: Path) -> bool:
    """Return whether there are images or tar shards below a folder with subfolders, or no data
    files in a folder."""
    has_subfolders = any(entry.is_dir() for entry in folder.iterdir())
    has_data = False
    for path in folder.rglob("*") if has_subfolders else folder.iterdir():
        if has_subfolders and (is_tar(path.name) or path.suffix[1:].lower() in IMAGE_SUFFIXES):
            return True
        has_data = has_data or (is_table(path) and not is_tar(path.name))
    return not has_data
