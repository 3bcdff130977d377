"""Wheels for what an image with torch, transformers, peft and accelerate lacks."""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PYTHON = "3.12"
#: CUDA library of bitsandbytes that is kept, for images with CUDA 13.
BITSANDBYTES_LIBRARY = "libbitsandbytes_cuda130.so"
#: Packages of the image that are not taken along.
NEEDED = (
    "annotated-types", "bitsandbytes", "dill", "liger-kernel", "markdown-it-py", "mdurl",
    "nvidia-ml-py", "psutil", "pydantic", "pydantic-core", "pygments", "rich", "schedulefree",
    "torchao", "typing-inspection",
)  # fmt: skip
PLATFORMS = [f"manylinux{name}_x86_64" for name in ("2014", "_2_17", "_2_24", "_2_28")]


def download_wheels(folder: Path, constraints: Path) -> dict[str, str]:
    """Download the wheels, each without what it depends on; return the missing ones with the
    reason. The package index is the one that pip is configured with."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = {}
    for name in NEEDED:
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                sys.executable, "-m", "pip", "download", name, "--dest", scratch, "--no-deps",
                "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp",
                *(argument for platform in PLATFORMS for argument in ("--platform", platform)),
                "--constraint", str(constraints), "--quiet", "--disable-pip-version-check",
                "--retries", "1",
            ]  # fmt: skip
            done = subprocess.run(command, capture_output=True, text=True)
            files = list(Path(scratch).glob("*.whl"))
            if done.returncode != 0 or len(files) != 1:
                lines = done.stderr.strip().splitlines() or ["pip downloaded no wheel"]
                missing[name] = lines[-1]
            elif name == "bitsandbytes":
                drop_other_libraries(files[0], folder / files[0].name)
            else:
                shutil.move(files[0], folder / files[0].name)
    return missing


def drop_other_libraries(wheel: Path, target: Path) -> None:
    """Copy the wheel of bitsandbytes with one library for CUDA and the library for the CPU.

    Raises:
        ValueError: the wheel has no such library.
    """
    kept = ("libbitsandbytes_cpu.so", BITSANDBYTES_LIBRARY)
    with (
        zipfile.ZipFile(wheel) as source,
        zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as result,
    ):
        names = [Path(name).name for name in source.namelist()]
        if BITSANDBYTES_LIBRARY not in names:
            raise ValueError(f"{wheel.name} has no {BITSANDBYTES_LIBRARY}")
        for entry in source.infolist():
            name = Path(entry.filename).name
            if not name.startswith("libbitsandbytes_") or name in kept:
                result.writestr(entry, source.read(entry))


def unpack_missing(wheels: Path, target: Path) -> list[str]:
    """Unpack the wheels of packages that are not installed; return the folders to put on the
    path."""
    target.mkdir(parents=True, exist_ok=True)
    for wheel in sorted(wheels.glob("*.whl")):
        try:
            version(wheel.name.split("-")[0])
        except PackageNotFoundError:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target)
    return [str(target)]
