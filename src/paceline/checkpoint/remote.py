"""Checkpoints outside the run's folder: ``checkpoint_dir``, an object store or another folder,
through fsspec.

A checkpoint is written to ``output_dir/checkpoints`` as always; then the host of rank 0 uploads it.
Its manifest is uploaded last and is the commit: a checkpoint without one does not exist, and what
an interrupted upload left is removed by the next run that claims the place. At a start the newest
whole checkpoint of the store is downloaded if ``output_dir`` does not hold it, so everything else
reads local files.

Two runs that write to the same place exclude each other by claims: objects
``claims/claim-00000003.json`` with increasing numbers, each created on the condition that it does
not exist. The highest number owns the place; a run that finds a higher one when it is about to
commit ends. No torch here.
"""

import fcntl
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from paceline.checkpoint.format import MANIFEST, is_file_of_checkpoint, name_of
from paceline.checkpoint.integrity import read_manifest, verify
from paceline.checkpoint.writer import remove
from paceline.core.errors import ConfigError, SaveError
from paceline.core.processes import host_name

Warn = Callable[[str], None]

_CLAIMS = "claims"
#: URL scheme → (package that fsspec needs for it, extra of Paceline that installs it; None: it has
#: none).
_PACKAGES: dict[str, tuple[str, str | None]] = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", None),
}


class ClaimLostError(ConfigError):
    """Another run writes checkpoints to the same place (exit code 2)."""


@dataclass(frozen=True)
class Claim:
    """Which run claimed a place, when, in seconds since the epoch."""

    host: str
    pid: int
    output_dir: str
    time: float


def is_url(text: str) -> bool:
    return "://" in text


def check_url(key: str, text: str) -> None:
    """Raise ConfigError if ``text`` names a store that cannot be used. Connects to nothing."""
    if not is_url(text):
        return
    parts = urlsplit(text)
    if "@" in parts.netloc:
        raise ConfigError(
            f"`{key}` contains credentials, and it is written to config.yaml",
            fix=(
                "remove them from the URL and set them in the environment (`AWS_ACCESS_KEY_ID`,"
                " `AWS_SECRET_ACCESS_KEY`, a profile or a role)"
            ),
        )
    if parts.scheme not in _PACKAGES:
        raise ConfigError(
            f"`{key}: {text}` has the scheme {parts.scheme!r}",
            allowed="a folder, or a URL that begins with "
            + ", ".join(f"{one}://" for one in _PACKAGES),
        )
    if not parts.netloc:
        raise ConfigError(
            f"`{key}: {text}` names no bucket", allowed=f"{parts.scheme}://BUCKET/PREFIX"
        )
    package, extra = _PACKAGES[parts.scheme]
    if importlib.util.find_spec(package) is None:
        install = f"paceline[{extra}]" if extra else package
        raise ConfigError(
            f"`{key}: {text}` needs the package {package}", fix=f"`pip install '{install}'`"
        )


class CheckpointStore:
    """A place with checkpoints of one run below ``url``. Methods raise OSError (fsspec's errors are
    of that type) or what the store's own library raises.

    Args:
        url: ``s3://bucket/prefix``, or a folder.
        key: the config key that named it, for errors.
    """

    def __init__(self, url: str, key: str = "checkpoint_dir") -> None:
        check_url(key, url)
        from fsspec.core import url_to_fs

        self.url, self.key = url.rstrip("/"), key
        options = {"use_listings_cache": False} if is_url(url) else {"auto_mkdir": True}
        self._fs, root = url_to_fs(
            self.url if is_url(url) else os.path.abspath(url), skip_instance_cache=True, **options
        )
        self._root = root.rstrip("/")
        self._is_folder = not is_url(url)
        self._number: int | None = None  # of this run's claim

    # -- what is there
    def names(self) -> list[str]:
        """The committed checkpoints, oldest first."""
        return sorted(
            (one.split("/")[0] for one in self._objects() if _is_manifest(one)), key=_step_of
        )

    def _objects(self) -> list[str]:
        """Paths of all objects, relative to the place."""
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._root)
        except FileNotFoundError:
            if self._is_folder:
                return []
            raise
        return [one[len(self._root) :].lstrip("/") for one in found]

    def check(self) -> None:
        """Raise ConfigError if the place cannot be read."""
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
                f"`{self.key}: {self.url}` cannot be used: {reason_of(error)}",
                fix=(
                    "check the bucket's name and the credentials in the environment (for S3:"
                    " `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, `AWS_PROFILE` or a role;"
                    " `AWS_ENDPOINT_URL` for other services than AWS)"
                ),
            ) from error

    # -- reading
    def fetch_newest(self, folder: Path, warn: Warn) -> None:
        """Download the newest whole checkpoint to ``folder``, unless it is there. ``warn`` gets
        what is wrong with each newer one. Processes of a host that do this at the same time
        download it once.

        Raises:
            ConfigError: the place cannot be read.
        """
        with self._as_config_error():
            names = self.names()
            if not names:
                return
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".fetch.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                for name in reversed(names):
                    problem = self._fetch(name, folder)
                    if problem is None:
                        return
                    warn(problem)

    def fetch(self, name: str, folder: Path) -> Path:
        """Download one checkpoint to ``folder``.

        Raises:
            ConfigError: it is not whole, or cannot be read.
        """
        with self._as_config_error():
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / ".fetch.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                problem = self._fetch(name, folder)
        if problem is not None:
            raise ConfigError(
                problem, fix="use an earlier checkpoint, or `resume: auto`, which does"
            )
        return folder / name

    def _fetch(self, name: str, folder: Path) -> str | None:
        """Returns what is wrong with the checkpoint; it appears in ``folder`` whole or not at
        all."""
        final, aside = folder / name, folder / f".{name}.{os.getpid()}.fetch"
        manifest = self._fs.cat_file(self._path(name, MANIFEST))
        is_copy = (final / MANIFEST).is_file() and (final / MANIFEST).read_bytes() == manifest
        if is_copy and verify(final) is None:
            return None
        remove(aside)
        aside.mkdir()
        try:
            (aside / MANIFEST).write_bytes(manifest)
            try:
                files = read_manifest(aside)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                return f"{self.url}/{name}/{MANIFEST} is broken"
            for one in files:
                if one == MANIFEST or not is_file_of_checkpoint(one):
                    return (
                        f"{self.url}/{name}/{MANIFEST} names {one!r}, which does not belong to a"
                        " checkpoint"
                    )
                try:
                    self._fs.get_file(self._path(name, one), str(aside / one))
                except FileNotFoundError:
                    return f"{self.url}/{name}/{one} is missing"
            problem = verify(aside)
            if problem is not None:
                return problem.replace(str(aside), f"{self.url}/{name}")
            remove(final)
            os.replace(aside, final)
        finally:
            remove(aside)
        return None

    # -- writing
    def claim(self, output_dir: Path) -> Claim | None:
        """Make this run the one that writes here, and remove what interrupted uploads left. Returns
        the record of the run that wrote here before, if that was another one.

        Raises:
            ConfigError: the place cannot be written.
        """
        with self._as_config_error():
            before, claims = None, []
            claim = Claim(host_name(), os.getpid(), str(output_dir.absolute()), time.time())
            while self._number is None:
                claims = self._claims()
                number = claims[-1] + 1 if claims else 1
                if claims:
                    before = self._record(claims[-1])
                try:
                    self._create(
                        self._path(_CLAIMS, _claim_name(number)), json.dumps(asdict(claim)).encode()
                    )
                except FileExistsError:
                    continue  # another run was faster: the next number
                self._number = number
            for old in claims:
                self._delete(f"{_CLAIMS}/{_claim_name(old)}")
            self._clear_debris()
        if before is None or (before.host, before.output_dir) == (claim.host, claim.output_dir):
            return None
        return before

    def publish(self, path: Path) -> None:
        """Upload a committed checkpoint. The manifest, last, makes it one.

        Raises:
            ClaimLostError: another run claimed the place.
        """
        self._check_claim()
        name = path.name
        manifest = self._path(name, MANIFEST)
        # left by this run before a rollback, or damaged: it is replaced
        if self._fs.exists(manifest):
            self._delete(f"{name}/{MANIFEST}")
        for file in sorted(read_manifest(path)):
            self._fs.put_file(str(path / file), self._path(name, file))
        self._check_claim()
        try:
            self._create(manifest, (path / MANIFEST).read_bytes())
        except FileExistsError as error:
            raise self._lost(None) from error

    def upload(self, path: Path, keep: int | None, superseded: Collection[int]) -> list[str]:
        """:meth:`publish` a checkpoint, then :meth:`prune`. Returns warnings.

        Raises:
            ClaimLostError: another run claimed the place.
            SaveError: it could not be uploaded.
        """
        try:
            self.publish(path)
        except ClaimLostError:
            raise
        except Exception as error:
            raise SaveError(
                f"the checkpoint {path} could not be uploaded to {self.url}: {reason_of(error)}",
                fix=(
                    "check the connection and the credentials; the same command resumes from it,"
                    " and earlier checkpoints are untouched"
                ),
            ) from error
        try:
            self.prune(keep, superseded)
        except Exception as error:
            text = f"older checkpoints in {self.url} could not be removed: {reason_of(error)}"
            return [text]
        return []

    def prune(self, keep: int | None, superseded: Collection[int] = ()) -> None:
        """Remove all but the newest ``keep`` checkpoints (None keeps all), and those of the steps
        ``superseded``. The manifest goes first, so a removal that is cut leaves no checkpoint that
        looks whole."""
        names = self.names()
        gone = [one for one in names if _step_of(one) in superseded]
        if keep is not None:
            gone += [one for one in names if one not in gone][:-keep]
        if not gone:
            return
        self._check_claim()
        for name in gone:
            self._delete(f"{name}/{MANIFEST}")
        for one in self._objects():
            if one.split("/")[0] in gone:
                self._delete(one)

    def _clear_debris(self) -> None:
        objects = self._objects()
        whole = {one.split("/")[0] for one in objects if _is_manifest(one)}
        for one in objects:
            name = one.split("/")[0]
            if name.startswith("step-") and name not in whole:
                self._delete(one)
        self._abort_uploads()

    def _abort_uploads(self) -> None:
        """Parts of a file whose upload was interrupted are invisible, and the store charges for
        them."""
        if not hasattr(self._fs, "call_s3"):
            return
        bucket, _, prefix = self._root.partition("/")
        found = self._fs.call_s3(
            "list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/step-" if prefix else "step-"
        )
        for one in found.get("Uploads") or []:
            self._fs.call_s3(
                "abort_multipart_upload", Bucket=bucket, Key=one["Key"], UploadId=one["UploadId"]
            )

    # -- claims
    def _claims(self) -> list[int]:
        found = [
            one.partition("/")[2] for one in self._objects() if one.startswith(f"{_CLAIMS}/claim-")
        ]
        return sorted(
            int(one[len("claim-") : -len(".json")]) for one in found if one.endswith(".json")
        )

    def _record(self, number: int) -> Claim | None:
        try:
            return Claim(**json.loads(self._fs.cat_file(self._path(_CLAIMS, _claim_name(number)))))
        except (FileNotFoundError, ValueError, TypeError):
            return None

    def _check_claim(self) -> None:
        claims = self._claims()
        if self._number is None or not claims or claims[-1] != self._number:
            raise self._lost(self._record(claims[-1]) if claims else None)

    def _lost(self, other: Claim | None) -> ClaimLostError:
        who = "another run"
        if other is not None:
            began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(other.time))
            who = (
                f"the run in {other.output_dir} on host {other.host} (process"
                f" {other.pid}, since {began})"
            )
        return ClaimLostError(
            f"`{self.key}: {self.url}` now belongs to {who}, so this run writes no more checkpoints"
            " there",
            fix="stop one of the two runs, or give this one another `checkpoint_dir`",
        )

    # -- objects
    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _create(self, path: str, data: bytes) -> None:
        """Write an object on the condition that it does not exist. Raises FileExistsError."""
        if self._is_folder:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=Path(path).parent, prefix=".") as aside:
                aside.write(data)
                aside.flush()
                os.fsync(aside.fileno())
                os.link(aside.name, path)  # fails if it exists, and never shows a half-written file
            return
        self._fs.pipe_file(path, data, mode="create")

    def _delete(self, relative: str) -> None:
        try:
            self._fs.rm_file(self._path(*relative.split("/")))
        except FileNotFoundError:
            return
        if self._is_folder:
            folder = Path(self._path(*relative.split("/"))).parent
            if folder != Path(self._root) and not any(folder.iterdir()):
                shutil.rmtree(folder, ignore_errors=True)


def fetch_checkpoint(text: str, folder: Path, warn: Warn, key: str = "resume") -> Path:
    """Download the checkpoint that a URL names to ``folder``: ``…/step-00000040``, or the newest
    whole one below it.

    Raises:
        ConfigError: there is none, or it is not whole.
    """
    text = text.rstrip("/")
    parent, _, last = text.rpartition("/")
    if last.startswith("step-"):
        return CheckpointStore(parent, key).fetch(last, folder)
    store = CheckpointStore(text, key)
    with store._as_config_error():
        names = store.names()
    for name in reversed(names):
        try:
            return store.fetch(name, folder)
        except ConfigError as error:
            warn(error.what)
    raise ConfigError(
        f"`{key}: {text}` holds no whole checkpoint",
        allowed=f"a place with checkpoints, or a checkpoint such as {text}/{name_of(40)}",
    )


def reason_of(error: BaseException) -> str:
    """One line; credentials never appear in the errors of fsspec and botocore."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _is_manifest(path: str) -> bool:
    name, _, rest = path.partition("/")
    return rest == MANIFEST and name.startswith("step-") and name[len("step-") :].isdecimal()


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def _claim_name(number: int) -> str:
    return f"claim-{number:08d}.json"
