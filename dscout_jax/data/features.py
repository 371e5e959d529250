"""Target features on disk, so that training need not run the target again each epoch.

A cache folder holds `manifest.json` (what features depend on besides the tokens) and numbered
shards in array_record form, one record a row: its features, [T, C * D] bfloat16. Beside each shard
lies a JSON file that names the rows with their tokens; it is written last, so a shard without it is
the rest of an interrupted run and is ignored. Rows are found by id, so a cache grows with the data,
and a row may be cut shorter than it was when its features were computed.

The last token of a row needs no features: nothing lies behind it that could attend to it.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from absl import logging
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from dscout_jax.data.pipeline import Example, pad_batch
from dscout_jax.data.responses import check_settings
from dscout_jax.files import lock_exclusively, write_json

FeaturesFn = Callable[[np.ndarray, np.ndarray], np.ndarray]

SHARD_ROWS = 128
BYTES_PER_VALUE = 2
_WRITER_OPTIONS = "group_size:1,uncompressed"  # one record at a time is read; bfloat16 is noise
_READER_OPTIONS = "readahead_buffer_size:0"  # rows are read in no order


def feature_settings(
    target_sha256: str, tap_ids: Sequence[int], width: int, target_dtype: str = "float32"
) -> dict[str, Any]:
    """Returns what a cache's features depend on; stored as its manifest and compared on opening.

    Args:
        target_sha256: digest of the target's weights.
        tap_ids: tapped layers, 0-based, in the order of the features.
        width: C * D, values of one token.
        target_dtype: in which the target's matrices were multiplied.
    """
    return {
        "format": "array_record",
        "target_sha256": target_sha256,
        "tap_ids": [int(tap) for tap in tap_ids],
        "width": int(width),
        "dtype": "bfloat16",
        "target_dtype": target_dtype,
    }


def num_bytes(rows: Sequence[Example], settings: Mapping[str, Any]) -> int:
    """Returns the bytes that the features of some rows take on disk."""
    return sum(len(row.tokens) for row in rows) * settings["width"] * BYTES_PER_VALUE


class FeatureWriter:
    """Appends rows to a cache, `SHARD_ROWS` to a shard; use it as a context manager.

    Rows of a shard that is not full count only once the writer is closed.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        """Opens or creates the cache for writing.

        Raises:
            ValueError: the folder holds a cache made under other settings.
            BlockingIOError: another process writes to it.
        """
        self._folder = Path(folder)
        self._settings = settings
        self._folder.mkdir(parents=True, exist_ok=True)
        manifest = self._folder / "manifest.json"
        if manifest.exists():
            check_settings(_read_json(manifest), settings, where=f"feature cache {folder}")
        else:
            write_json(manifest, settings)
        self._lock = open(self._folder / "lock", "w")  # noqa: SIM115 (closed by close)
        try:
            lock_exclusively(self._lock, f"feature cache {folder}", "another folder")
        except BlockingIOError:
            self._lock.close()
            raise
        for path in [*self._folder.glob("shard-*.tmp"), *_without_side_file(self._folder)]:
            path.unlink()
        self._number = 1 + max((int(p.stem[6:]) for p in _side_files(self._folder)), default=-1)
        self._writer: ArrayRecordWriter | None = None
        self._rows: list[dict[str, Any]] = []

    def __enter__(self) -> "FeatureWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, row_id: str, tokens: Sequence[int], features: np.ndarray) -> None:
        """Adds the features of a row.

        Args:
            row_id: the prompt's id.
            tokens: T token ids.
            features: [T, C * D], any float dtype.

        Raises:
            ValueError: the features have another shape.
        """
        expected = (len(tokens), self._settings["width"])
        if features.shape != expected:
            raise ValueError(f"features of {row_id!r} have shape {features.shape}, not {expected}")
        if self._writer is None:
            self._writer = ArrayRecordWriter(str(self._temporary()), _WRITER_OPTIONS)
        self._writer.write(features.astype(ml_dtypes.bfloat16).tobytes())
        self._rows.append({"id": row_id, "tokens": [int(token) for token in tokens]})
        if len(self._rows) == SHARD_ROWS:
            self._finish_shard()

    def close(self) -> None:
        """Writes what is left as a smaller shard and releases the lock."""
        if self._writer is not None:
            self._finish_shard()
        self._lock.close()

    def _temporary(self) -> Path:
        return _shard_path(self._folder, self._number).with_suffix(".tmp")

    def _finish_shard(self) -> None:
        self._writer.close()
        path = _shard_path(self._folder, self._number)
        with open(self._temporary(), "rb") as file:
            os.fsync(file.fileno())
        os.replace(self._temporary(), path)
        side = {"num_bytes": path.stat().st_size, "rows": self._rows}
        write_json(path.with_suffix(".json"), side)
        self._writer, self._rows, self._number = None, [], self._number + 1


class FeatureCache:
    """An opened cache; `cache[id]` are the [T, C * D] bfloat16 features of a row.

    Raises (on opening):
        FileNotFoundError: no cache there.
        ValueError: made under other settings; the fields are named.
    """

    def __init__(self, folder: str | Path, settings: Mapping[str, Any]):
        """Opens what the cache holds now; rows that are added later are not seen.

        Args:
            folder: the cache.
            settings: from `feature_settings`, compared with the manifest.
        """
        folder = Path(folder)
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise FileNotFoundError(f"no feature cache in {folder}: manifest.json is missing")
        check_settings(_read_json(manifest), settings, where=f"feature cache {folder}")
        self._folder = folder
        self._width = settings["width"]
        self._readers: dict[int, ArrayRecordReader] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._tokens: dict[str, np.ndarray] = {}
        for side_file in _side_files(folder):
            side, number = _read_json(side_file), int(side_file.stem[6:])
            path = _shard_path(folder, number)
            if not path.is_file() or path.stat().st_size != side["num_bytes"]:
                logging.warning("%s is missing or torn: its rows are computed again", path)
                continue
            for index, row in enumerate(side["rows"]):
                self._places[row["id"]] = (number, index)
                self._tokens[row["id"]] = np.asarray(row["tokens"], np.int32)

    def __len__(self) -> int:
        return len(self._places)

    def missing(self, examples: Sequence[Example]) -> list[Example]:
        """Returns the rows without features.

        Raises:
            ValueError: features are there, but of another answer to the same prompt.
        """
        missing = []
        for example in examples:
            cached = self._tokens.get(example.id)
            if cached is None or len(cached) < len(example.tokens) - 1:
                missing.append(example)
            elif not np.array_equal(cached[: len(example.tokens)], example.tokens[: len(cached)]):
                raise ValueError(
                    f"feature cache {self._folder} holds the features of another answer to "
                    f"{example.id!r}; give another folder or delete the cache"
                )
        return missing

    def __getitem__(self, row_id: str) -> np.ndarray:
        number, index = self._places[row_id]
        if number not in self._readers:
            path = _shard_path(self._folder, number)
            self._readers[number] = ArrayRecordReader(str(path), _READER_OPTIONS)
        try:
            (record,) = self._readers[number].read([index])
        except RuntimeError as error:
            path = _shard_path(self._folder, number)
            raise ValueError(f"{path} is damaged; delete it and run again: {error}") from error
        return np.frombuffer(record, ml_dtypes.bfloat16).reshape(-1, self._width)


def fill_feature_cache(
    folder: str | Path,
    examples: Sequence[Example],
    settings: Mapping[str, Any],
    features_fn: FeaturesFn,
    *,
    batch_size: int = 8,
    length_multiple: int = 64,
) -> Iterator[int]:
    """Computes the rows that a cache lacks; yields after each shard how many are still missing.

    Nothing happens until the result is iterated; an interrupted run goes on where it was.

    Args:
        folder: the cache; made where missing.
        examples: rows.
        settings: from `feature_settings`.
        features_fn: `(tokens [B, T], length [B]) -> features [B, T, C * D]`, any float dtype; T is
            a multiple of `length_multiple`.
        batch_size: B; a last batch is filled with empty rows.
        length_multiple: rows are padded to a multiple of this many tokens only.

    Raises:
        ValueError: the folder holds a cache made under other settings or of other answers, or
            `features_fn` returns another shape.
        OSError: the disk has not enough room for what is missing.
    """
    missing = list(examples)
    if (Path(folder) / "manifest.json").is_file():
        missing = FeatureCache(folder, settings).missing(examples)
    if not missing:  # then another process may be writing
        return
    with FeatureWriter(folder, settings) as writer:
        _check_room(Path(folder), num_bytes(missing, settings))
        for start in range(0, len(missing), SHARD_ROWS):
            shard = missing[start : start + SHARD_ROWS]
            shard.sort(key=lambda example: len(example.tokens))  # little padding
            for first in range(0, len(shard), batch_size):
                rows = shard[first : first + batch_size]
                padded = -(-len(rows[-1].tokens) // length_multiple) * length_multiple
                batch = pad_batch(rows, padded, batch_size=batch_size)
                features = np.asarray(features_fn(batch["tokens"], batch["length"]))
                for index, row in enumerate(rows):
                    writer.add(row.id, row.tokens, features[index, : len(row.tokens)])
            yield max(len(missing) - start - SHARD_ROWS, 0)


def _check_room(folder: Path, needed: int) -> None:
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise OSError(
            f"the feature cache needs {needed / 1e9:.2f} GB more in {folder}, where "
            f"{free / 1e9:.2f} GB are free; use another folder or recompute features in the step"
        )


def _side_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("shard-*.json"))


def _without_side_file(folder: Path) -> list[Path]:
    shards = folder.glob("shard-*.array_record")
    return [path for path in shards if not path.with_suffix(".json").is_file()]


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.array_record"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
