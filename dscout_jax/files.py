"""Files that are whole or absent, also after a crash, and folders that can be written."""

import fcntl
import json
import math
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import IO, Any


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Replaces a file in one step, so that a reader never sees half of it.

    Raises:
        OSError: the file cannot be written; an old one stays as it was.
    """
    path = pathlib.Path(path)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Writes a UTF-8 text in one step; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike, values: Mapping[str, Any]) -> None:
    """Writes indented JSON in one step; NaN and infinity become null.

    Raises:
        TypeError: a value that JSON lacks; nothing is written.
        OSError: see `write_bytes`.
    """
    write_text(path, json.dumps(_finite(values), indent=1, allow_nan=False) + "\n")


def require_writable(directory: str | os.PathLike) -> pathlib.Path:
    """Creates `directory` if need be and proves that files can be written there.

    Raises:
        ValueError: it cannot be created, or a file in it cannot.
    """
    path = pathlib.Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ValueError(
            f"cannot write in {path}: {error.strerror}; "
            "give a directory in which this user may create files"
        ) from error
    return path


def lock_exclusively(file: IO, what: str, instead: str) -> None:
    """Locks an open file against a second writer, until it is closed.

    Args:
        file: the open file.
        what: names it in the message.
        instead: what else to give, such as `another folder`.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(
            f"{what} is being written by another process; wait for it or give {instead}"
        ) from error


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
