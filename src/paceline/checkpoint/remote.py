"""Store checkpoints in ``checkpoint_dir``, an object store or another folder, through fsspec.

A checkpoint is first written to ``output_dir/checkpoints``; then the host of rank 0 uploads it. The
manifest is uploaded last and commits the upload: a checkpoint without one does not exist, and the
next run that claims the location removes what an interrupted upload left. At the start of a run,
the latest valid checkpoint is downloaded unless ``output_dir`` already has it, so all other code
reads local files.

Claims keep two runs from writing to the same location: objects ``claims/claim-00000003.json`` with
increasing numbers, each created on the condition that it does not exist. The run with the highest
number owns the location. A run that finds a higher number when it is about to commit fails. Imports
no torch.
"""

import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint.format import (
    MANIFEST,
    is_checkpoint_file,
    name_of,
    names_to_prune,
    step_of,
)
from paceline.checkpoint.integrity import read_manifest, verify
from paceline.checkpoint.store import not_pruned_text
from paceline.checkpoint.urls import check_url, is_url
from paceline.checkpoint.writer import remove
from paceline.core.errors import ConfigError, SaveError, first_line
from paceline.core.processes import host_name

logger = logging.getLogger(__name__)

Warn = Callable[[str], None]

_CLAIM = re.compile(r"claims/claim-(\d+)\.json")
_MANIFEST = re.compile(rf"(step-\d+)/{re.escape(MANIFEST)}")


class ClaimLostError(ConfigError):
    """Another run has claimed the same location (exit code 2)."""


@dataclass(frozen=True)
class LocationClaim:
    """The run that claimed a location, and when (``time``, in seconds since the epoch)."""

    host: str
    pid: int
    output_dir: str
    time: float


class CheckpointStore:
    """The checkpoints of one run below ``url``. Methods raise OSError, as fsspec does, or errors of
    the store's library, unless documented otherwise.

    Args:
        url: ``s3://bucket/prefix``, or a folder.
        key: the config key that set it, for errors.
    """

    def __init__(self, url: str, key: str = "checkpoint_dir") -> None:
        check_url(key, url)
        from fsspec.core import url_to_fs

        self.url, self.key = url.rstrip("/"), key
        self._is_folder = not is_url(url)
        location = os.path.abspath(url) if self._is_folder else self.url
        options = {"auto_mkdir": True} if self._is_folder else {"use_listings_cache": False}
        self._fs, root = url_to_fs(location, skip_instance_cache=True, **options)
        self._root = root.rstrip("/")
        self._number: int | None = None  # the number of this run's claim

    # -- listing
    def names(self) -> list[str]:
        """Return the committed checkpoints, oldest first."""
        manifests = (_MANIFEST.fullmatch(path) for path in self._objects())
        return sorted((match[1] for match in manifests if match), key=step_of)

    def _objects(self) -> list[str]:
        """Return the paths of all objects, relative to the location."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.find(self._root)
        except FileNotFoundError:
            if self._is_folder:
                return []
            raise
        return [path[len(self._root) :].lstrip("/") for path in paths]

    def check(self) -> None:
        """Raise ConfigError if the location cannot be read."""
        with self._as_config_error():
            self.names()

    @contextmanager
    def _as_config_error(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                "`{key}: {url}` cannot be used: {reason}",
                code="storage-unusable",
                fix="check the name of the bucket and the credentials in the environment (for S3:"
                " `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, `AWS_PROFILE` or a role;"
                " `AWS_ENDPOINT_URL` for services other than AWS)",
                key=self.key,
                url=self.url,
                reason=first_line(error),
            ) from error

    # -- reading
    def fetch_latest(self, folder: Path, warn: Warn) -> None:
        """Download the latest valid checkpoint to ``folder``, unless it is already there. ``warn``
        receives what is wrong with each later checkpoint.

        Raises:
            ConfigError: the location cannot be read.
        """
        with self._as_config_error():
            for name in reversed(self.names()):
                problem = self._fetch(name, folder)
                if problem is None:
                    return
                warn(problem)

    def fetch(self, name: str, folder: Path) -> Path:
        """Download one checkpoint to ``folder``.

        Raises:
            ConfigError: the checkpoint is not valid, or cannot be read.
        """
        with self._as_config_error():
            problem = self._fetch(name, folder)
        if problem is not None:
            raise ConfigError(
                problem,
                code="invalid-checkpoint",
                fix="use an earlier one, or `resume: auto`, which does",
            )
        return folder / name

    def _fetch(self, name: str, folder: Path) -> str | None:
        """Download a checkpoint, which appears in ``folder`` completely or not at all. Return what
        is wrong with it, or None. If several processes of a host call this at the same time, only
        the first one downloads."""
        final, staging_dir = folder / name, folder / f".{name}.{os.getpid()}.fetch"
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ".fetch.lock", "w") as lock:
            with suppress(OSError):  # a file system without locks: every process downloads
                fcntl.flock(lock, fcntl.LOCK_EX)
            manifest = self._fs.cat_file(self._path(name, MANIFEST))
            is_copy = (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == manifest
            if is_copy and verify(final) is None:
                return None
            remove(staging_dir)
            staging_dir.mkdir()
            try:
                (staging_dir / MANIFEST).write_bytes(manifest)
                problem = self._download(name, staging_dir)
                if problem is None:
                    remove(final)
                    os.replace(staging_dir, final)
                return problem
            finally:
                remove(staging_dir)

    def _download(self, name: str, staging_dir: Path) -> str | None:
        """Download the files in the manifest to ``staging_dir``. Return what is wrong with them, or
        None."""
        source = f"{self.url}/{name}"
        try:
            files = read_manifest(staging_dir)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return f"{source}/{MANIFEST} is damaged"
        for file in files:
            if file == MANIFEST or not is_checkpoint_file(file):
                return f"{source}/{MANIFEST} lists {file!r}, which is not a file of a checkpoint"
            try:
                self._fs.get_file(self._path(name, file), str(staging_dir / file))
            except FileNotFoundError:
                return f"{source}/{file} is missing"
        problem = verify(staging_dir)
        return problem and problem.replace(str(staging_dir), source)

    # -- writing
    def claim(self, output_dir: Path) -> LocationClaim | None:
        """Make this run the only one that writes to the location, and remove what interrupted
        uploads left behind. Return the previous claim if it belonged to another run, otherwise
        None.

        Raises:
            ConfigError: the location cannot be written.
        """
        with self._as_config_error():
            before, claims = None, []
            claim = LocationClaim(host_name(), os.getpid(), str(output_dir.absolute()), time.time())
            while self._number is None:
                claims = self._claims()
                number = claims[-1] + 1 if claims else 1
                if claims:
                    before = self._record(claims[-1])
                try:
                    self._create(_claim_path(number), json.dumps(asdict(claim)).encode())
                except FileExistsError:
                    continue  # another run created this claim first: try the next number
                self._number = number
            for old in claims:
                self._delete(_claim_path(old))
            self._clear_debris()
        if before is None or (before.host, before.output_dir) == (claim.host, claim.output_dir):
            return None
        return before

    def publish(self, path: Path, tick: Callable[[], None] = lambda: None) -> None:
        """Upload a committed checkpoint. The manifest is uploaded last and commits it.

        Args:
            tick: function that is called whenever bytes were sent.

        Raises:
            ClaimLostError: another run claimed the location.
        """
        self._check_claim()
        name = path.name
        # The checkpoint exists already, because this run was rolled back or because it is damaged:
        # replace it.
        if self._fs.exists(self._path(name, MANIFEST)):
            self._delete(f"{name}/{MANIFEST}")
        for file in sorted(read_manifest(path)):
            self._fs.put_file(str(path / file), self._path(name, file), callback=_sent(tick))
            tick()
        self._check_claim()
        try:
            self._create(f"{name}/{MANIFEST}", (path / MANIFEST).read_bytes())
        except FileExistsError as error:
            raise self._lost(None) from error

    def upload(
        self,
        path: Path,
        keep: int | None,
        superseded: Collection[int],
        best_steps: Collection[int] = (),
        tick: Callable[[], None] = lambda: None,
    ) -> list[str]:
        """:meth:`publish` a checkpoint, then :meth:`prune`. Return warnings. ``tick`` is called
        whenever bytes were sent.

        Raises:
            ClaimLostError: another run claimed the location.
            SaveError: the upload failed.
        """
        try:
            self.publish(path, tick)
        except ClaimLostError:
            raise
        except Exception as error:
            raise SaveError(
                "the checkpoint {path} could not be uploaded to {url}: {reason}",
                code="upload-failed",
                fix="check the connection and the credentials; earlier checkpoints are untouched,"
                " and the same command resumes from the local one",
                path=path,
                url=self.url,
                reason=first_line(error),
            ) from error
        try:
            self.prune(keep, superseded, best_steps)
        except Exception as error:
            return [not_pruned_text(self.url, first_line(error))]
        return []

    def prune(
        self,
        keep: int | None,
        superseded: Collection[int] = (),
        best_steps: Collection[int] = (),
    ) -> None:
        """Remove checkpoints; for the arguments, see
        :func:`~paceline.checkpoint.format.names_to_prune`. The manifests are removed first, so that
        an interrupted removal leaves no checkpoint that looks valid."""
        removed = names_to_prune(self.names(), keep, superseded, best_steps)
        if not removed:
            return
        self._check_claim()
        for name in removed:
            self._delete(f"{name}/{MANIFEST}")
        for path in self._objects():
            if path.split("/")[0] in removed:
                self._delete(path)

    def _clear_debris(self) -> None:
        """Remove what interrupted uploads left behind."""
        committed = self.names()
        for path in self._objects():
            name = path.split("/")[0]
            if name.startswith("step-") and name not in committed:
                self._delete(path)
        if not hasattr(self._fs, "call_s3"):
            return
        # The parts of an interrupted multipart upload are not listed as objects, but the store
        # charges for them. Listing them needs a permission of its own.
        try:
            self._abort_multipart_uploads()
        except Exception as error:
            text = "parts of interrupted uploads cannot be removed from %s: %s"
            logger.info(text, self._root, first_line(error))

    def _abort_multipart_uploads(self) -> None:
        bucket, _, prefix = self._root.partition("/")
        response = self._fs.call_s3(
            "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/step-" if prefix else "step-"
        )
        for upload in response.get("Uploads") or []:
            self._fs.call_s3(
                "abort_multipart_upload",
                Bucket=bucket,
                Key=upload["Key"],
                UploadId=upload["UploadId"],
            )

    # -- claims
    def _claims(self) -> list[int]:
        """Return the numbers of the claims, in ascending order."""
        matches = (_CLAIM.fullmatch(path) for path in self._objects())
        return sorted(int(match[1]) for match in matches if match)

    def _record(self, number: int) -> LocationClaim | None:
        try:
            return LocationClaim(**json.loads(self._fs.cat_file(self._path(_claim_path(number)))))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _check_claim(self) -> None:
        claims = self._claims()
        if self._number is None or not claims or claims[-1] != self._number:
            raise self._lost(self._record(claims[-1]) if claims else None)

    def _lost(self, other: LocationClaim | None) -> ClaimLostError:
        owner = "another run"
        if other is not None:
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.time))
            owner = (
                f"the run in {other.output_dir} on host {other.host} (process {other.pid}, since"
                f" {since})"
            )
        return ClaimLostError(
            "`{key}: {url}` now belongs to {owner}, so this run writes no more checkpoints there",
            code="storage-taken-over",
            fix="stop one of the two runs, or set another `checkpoint_dir` for this one",
            key=self.key,
            url=self.url,
            owner=owner,
        )

    # -- objects
    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _create(self, relative: str, data: bytes) -> None:
        """Create an object. Raises FileExistsError if it exists already."""
        path = self._path(relative)
        if not self._is_folder:
            try:
                self._fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                # The client repeats a request whose response was lost, and then finds its own
                # object. Another run's object may have been deleted since.
                with suppress(FileNotFoundError):
                    if self._fs.cat_file(path) == data:
                        return
                raise
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=".") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            os.link(file.name, path)  # atomic; fails if the file exists

    def _delete(self, relative: str) -> None:
        path = self._path(relative)
        try:
            self._fs.rm_file(path)
        except FileNotFoundError:
            return
        parent = Path(path).parent
        if self._is_folder and parent != Path(self._root) and not any(parent.iterdir()):
            shutil.rmtree(parent, ignore_errors=True)


def _sent(tick: Callable[[], None]) -> Any:
    """Return a callback of fsspec that calls ``tick`` whenever bytes were sent."""
    from fsspec.callbacks import Callback

    return Callback(hooks={"tick": lambda *_, **__: tick()})


def fetch_checkpoint(text: str, folder: Path, warn: Warn, key: str = "resume") -> Path:
    """Download the checkpoint at a URL to ``folder``: the one that the URL names
    (``…/step-00000040``), or the latest valid one below it. ``warn`` receives what is wrong with
    each later checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or it is not valid.
    """
    text = text.rstrip("/")
    parent, _, name = text.rpartition("/")
    if name.startswith("step-"):
        return CheckpointStore(parent, key).fetch(name, folder)
    store = CheckpointStore(text, key)
    with store._as_config_error():
        names = store.names()
    for name in reversed(names):
        try:
            return store.fetch(name, folder)
        except ConfigError as error:
            warn(error.what)
    raise ConfigError(
        "`{key}: {text}` contains no valid checkpoint",
        code="no-checkpoint-in-storage",
        allowed="a location with checkpoints, or a checkpoint such as {text}/{example}",
        key=key,
        text=text,
        example=name_of(40),
    )


def _claim_path(number: int) -> str:
    return f"claims/claim-{number:08d}.json"
