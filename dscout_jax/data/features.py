"""Target features on disk, so that training need not run the target again each epoch.

A cache folder holds `manifest.json` (what the features depend on) and numbered shards: the
features of consecutive rows, end to end, as a [tokens, C * D] bfloat16 array in `.npy` form (raw
16-bit words, since the format has no bfloat16), each with a small JSON file that carries its
checksum. A shard is renamed into place once whole, so an interrupted writer goes on where it was.
"""

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dscout_jax.data.pipeline import ExampleSet, pad_batch
from dscout_jax.data.responses import check_settings
from dscout_jax.files import write_json

FeaturesFn = Callable[[np.ndarray, np.ndarray], np.ndarray]

SHARD_ROWS = 128
BYTES_PER_VALUE = 2


def feature_settings(
    examples: ExampleSet, target_sha256: str, tap_ids: Sequence[int], width: int
) -> dict[str, Any]:
    """Returns what a cache's features depend on; stored as its manifest and compared on opening.

    Args:
        examples: the unsplit rows.
        target_sha256: digest of the target's weights.
        tap_ids: tapped layers, 0-based, in the order of the features.
        width: C * D, values of one token.
    """
    return {
        "target_sha256": target_sha256,
        "tap_ids": [int(tap) for tap in tap_ids],
        "width": int(width),
        "dtype": "bfloat16",
        "examples_fingerprint": examples.fingerprint(),
        "num_rows": len(examples),
        "num_tokens": sum(len(example.tokens) for example in examples),
        "shard_rows": SHARD_ROWS,
    }


def cache_num_bytes(settings: Mapping[str, Any]) -> int:
    """Returns the bytes that the features of a cache take on disk."""
    return settings["num_tokens"] * settings["width"] * BYTES_PER_VALUE


def write_feature_cache(
    folder: str | Path,
    examples: ExampleSet,
    settings: Mapping[str, Any],
    features_fn: FeaturesFn,
    *,
    batch_size: int = 8,
    length_multiple: int = 64,
) -> Iterator[int]:
    """Writes the missing shards of a cache and yields the rows done so far after each of them.

    Nothing happens until the result is iterated. Print `cache_num_bytes(settings)` before.

    Args:
        folder: the cache; made where missing.
        examples: the unsplit rows.
        settings: from `feature_settings`.
        features_fn: `(tokens [B, T], length [B]) -> features [B, T, C * D]`, any float dtype; T is
            a multiple of `length_multiple`, at most S rounded up.
        batch_size: B, the last batch of a shard is filled with empty rows.
        length_multiple: rows are padded to a multiple of this many tokens only.

    Raises:
        ValueError: the folder holds a cache made under other settings, or `features_fn` returns
            another shape.
        OSError: the disk has not enough room for the shards that are missing.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.json"
    if manifest.exists():
        check_settings(_read_json(manifest), settings, where=f"feature cache {folder}")
    missing = [shard for shard in range(_num_shards(settings)) if not _is_whole(folder, shard)]
    _check_room(folder, examples, settings, missing)
    write_json(manifest, settings)
    for shard in missing:
        rows = _shard_rows(settings, shard)
        features = _compute_shard(
            examples, rows, settings["width"], features_fn, batch_size, length_multiple
        )
        _write_shard(folder, shard, features)
        yield rows.stop


class FeatureCache:
    """An opened cache; `cache[row]` are the [T, C * D] bfloat16 features of a row.

    Attributes:
        settings: the manifest.
    """

    def __init__(
        self, folder: str | Path, examples: ExampleSet, settings: Mapping[str, Any],
        *, verify: bool = False,
    ):  # fmt: skip
        """Opens a cache, memory-mapped.

        Args:
            folder: the cache.
            examples: the unsplit rows it was made from.
            settings: from `feature_settings`, compared with the manifest.
            verify: also compare each shard's checksum (reads all of it).

        Raises:
            FileNotFoundError: no cache there.
            ValueError: made under other settings (the fields are named), unfinished, or torn.
        """
        folder = Path(folder)
        manifest = folder / "manifest.json"
        if not manifest.is_file():
            raise FileNotFoundError(f"no feature cache in {folder}: manifest.json is missing")
        self.settings = _read_json(manifest)
        check_settings(self.settings, settings, where=f"feature cache {folder}")
        lengths = np.asarray([len(example.tokens) for example in examples])
        self._shards: list[np.ndarray] = []
        self._offsets: list[np.ndarray] = []
        for shard in range(_num_shards(settings)):
            rows = _shard_rows(settings, shard)
            offsets = np.concatenate([[0], np.cumsum(lengths[rows.start : rows.stop])])
            self._shards.append(_open_shard(folder, shard, int(offsets[-1]), settings, verify))
            self._offsets.append(offsets)

    def __len__(self) -> int:
        return self.settings["num_rows"]

    def __getitem__(self, row: int) -> np.ndarray:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} is not in [0, {len(self)})")
        shard, index = divmod(row, self.settings["shard_rows"])
        start, stop = self._offsets[shard][index : index + 2]
        return self._shards[shard][start:stop].view(ml_dtypes.bfloat16)


def _compute_shard(
    examples: ExampleSet,
    rows: range,
    width: int,
    features_fn: FeaturesFn,
    batch_size: int,
    length_multiple: int,
) -> np.ndarray:
    """Returns [tokens of the shard, C * D] uint16 words of the bfloat16 features."""
    by_length = sorted(rows, key=lambda row: len(examples[row].tokens))  # little padding
    computed: dict[int, np.ndarray] = {}
    for start in range(0, len(by_length), batch_size):
        chosen = by_length[start : start + batch_size]
        longest = len(examples[chosen[-1]].tokens)
        padded = -(-longest // length_multiple) * length_multiple
        batch = pad_batch([examples[row] for row in chosen], padded, batch_size=batch_size)
        features = np.asarray(features_fn(batch["tokens"], batch["length"]))
        if features.shape != (batch_size, padded, width):
            raise ValueError(
                f"features_fn returned shape {features.shape}, the cache expects "
                f"{(batch_size, padded, width)}"
            )
        features = features.astype(ml_dtypes.bfloat16).view(np.uint16)
        for index, row in enumerate(chosen):
            computed[row] = features[index, : len(examples[row].tokens)]
    return np.concatenate([computed[row] for row in rows])


def _write_shard(folder: Path, shard: int, features: np.ndarray) -> None:
    path = _shard_path(folder, shard)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        np.save(file, features)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    side = {"num_bytes": path.stat().st_size, "crc32": zlib.crc32(features.data)}
    write_json(path.with_suffix(".json"), side)


def _is_whole(folder: Path, shard: int) -> bool:
    """Whether the shard and its side file exist and the size agrees."""
    path = _shard_path(folder, shard)
    side = path.with_suffix(".json")
    if not path.is_file() or not side.is_file():
        return False
    return path.stat().st_size == _read_json(side)["num_bytes"]


def _open_shard(
    folder: Path, shard: int, num_tokens: int, settings: Mapping[str, Any], verify: bool
) -> np.ndarray:
    path = _shard_path(folder, shard)
    if not _is_whole(folder, shard):
        raise ValueError(f"{path} is missing or torn; write the feature cache again to finish it")
    features = np.load(path, mmap_mode="r")
    expected = (num_tokens, settings["width"])
    if features.shape != expected or features.dtype != np.uint16:
        raise ValueError(
            f"{path} holds {features.dtype}{features.shape}, expected uint16{expected}"
        )
    if verify:
        crc32 = zlib.crc32(np.ascontiguousarray(features).data)
        if crc32 != _read_json(path.with_suffix(".json"))["crc32"]:
            raise ValueError(f"{path} is damaged (checksum); delete it and write the cache again")
    return features


def _check_room(
    folder: Path, examples: ExampleSet, settings: Mapping[str, Any], missing: Sequence[int]
) -> None:
    num_tokens = sum(
        len(examples[row].tokens) for shard in missing for row in _shard_rows(settings, shard)
    )
    needed = num_tokens * settings["width"] * BYTES_PER_VALUE
    stat = os.statvfs(folder)
    free = stat.f_bavail * stat.f_frsize
    if needed > free:
        raise OSError(
            f"the feature cache needs {needed / 1e9:.2f} GB more in {folder}, where "
            f"{free / 1e9:.2f} GB are free; use another folder or recompute features in the step"
        )


def _num_shards(settings: Mapping[str, Any]) -> int:
    return -(-settings["num_rows"] // settings["shard_rows"])


def _shard_rows(settings: Mapping[str, Any], shard: int) -> range:
    start = shard * settings["shard_rows"]
    return range(start, min(start + settings["shard_rows"], settings["num_rows"]))


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.npy"


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))
