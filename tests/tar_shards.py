"""Write tar shards."""

import io
import tarfile
from collections.abc import Mapping
from pathlib import Path


def write_shard(path: Path, files: Mapping[str, bytes]) -> Path:
    """Write files, in their order, to a tar file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as shard:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            shard.addfile(member, io.BytesIO(content))
    return path
