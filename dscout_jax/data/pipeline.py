"""Training batches from responses: cut, split, shuffle, pad; deterministic and resumable.

Rows are small (a few hundred tokens), so they are held in memory; grain orders and batches them.
"""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import grain
import numpy as np
from absl import logging

from dscout_jax.data.loops import LOOP_NGRAM, loop_start
from dscout_jax.data.responses import Response

MIN_RESPONSE_TOKENS = 2  # an anchor needs one supervised successor


@dataclass(frozen=True)
class Example:
    """One training row.

    Attributes:
        id: the prompt's id.
        row: position in the unsplit `ExampleSet`.
        tokens: [T] int32, prompt then response.
        response_start: index of the response's first token.
    """

    id: str
    row: int
    tokens: np.ndarray
    response_start: int


@dataclass(frozen=True)
class ExampleSet(Sequence[Example]):
    """Training rows with the account of how they were cut.

    Attributes:
        examples: the rows.
        max_length: S, no row is longer.
        num_loop_cut: rows whose response was cut where a loop starts.
        num_length_cut: rows whose response was cut at S.
        num_dropped: rows left out: fewer than two response tokens remained.
    """

    examples: tuple[Example, ...]
    max_length: int
    num_loop_cut: int = 0
    num_length_cut: int = 0
    num_dropped: int = 0

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    @property
    def num_response_tokens(self) -> int:
        """Response tokens over all rows."""
        return sum(len(e.tokens) - e.response_start for e in self.examples)

    def fingerprint(self) -> str:
        """Returns a sha256 over ids, order and tokens; checkpoints are tied to it."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(f"{example.id}:{example.response_start}:".encode())
            digest.update(example.tokens.astype("<i4").tobytes())
        return digest.hexdigest()


class RowFeatures(Protocol):
    """Target features by row, such as `features.FeatureCache`."""

    def __getitem__(self, row_id: str) -> np.ndarray:
        """Returns [T, C * D] features of a row, T at least its number of tokens minus one."""


def make_examples(
    responses: Iterable[Response], max_length: int, loop_ngram: int | None = LOOP_NGRAM
) -> ExampleSet:
    """Turns responses into training rows, ordered by id.

    A response is cut where its first repeated n-gram starts for the second time, then at
    `max_length`; rows that keep fewer than two response tokens are dropped. All three are counted.

    Args:
        responses: rows with distinct ids, for instance an open store.
        max_length: S, the longest row in tokens.
        loop_ngram: n of the loop cut; None keeps loops.

    Raises:
        ValueError: an id occurs twice, or no row is left.
    """
    examples: list[Example] = []
    num_loop_cut = num_length_cut = num_dropped = 0
    ordered = sorted(responses, key=lambda response: response.id)
    for previous, response in zip([None, *ordered[:-1]], ordered, strict=True):
        if previous is not None and previous.id == response.id:
            raise ValueError(f"id {response.id!r} occurs twice among the responses")
        answer = response.response
        if loop_ngram is not None:
            kept = loop_start(answer, loop_ngram)
            num_loop_cut += kept < len(answer)
            answer = answer[:kept]
        room = max(0, max_length - len(response.prompt))
        num_length_cut += room < len(answer)
        answer = answer[:room]
        if len(answer) < MIN_RESPONSE_TOKENS:
            num_dropped += 1
            continue
        tokens = np.asarray(response.prompt + answer, np.int32)
        examples.append(Example(response.id, len(examples), tokens, len(response.prompt)))
    if not examples:
        raise ValueError(
            f"no training row is left of {num_dropped} responses at max_length={max_length}"
        )
    made = ExampleSet(tuple(examples), max_length, num_loop_cut, num_length_cut, num_dropped)
    logging.info(
        "%d rows with %d response tokens; %d cut at a loop, %d cut at %d tokens, %d dropped",
        len(made), made.num_response_tokens, num_loop_cut, num_length_cut, max_length, num_dropped,
    )  # fmt: skip
    return made


def split_examples(
    examples: ExampleSet, validation_fraction: float = 0.04
) -> tuple[ExampleSet, ExampleSet]:
    """Returns (training, validation) rows, split by a hash of the id.

    A row keeps its side whatever other rows are added or removed.

    Raises:
        ValueError: the fraction is not in (0, 1), or a side would be empty.
    """
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction={validation_fraction} must lie between 0 and 1")
    sides: tuple[list[Example], list[Example]] = ([], [])
    for example in examples:
        sides[_hash_to_unit(example.id) < validation_fraction].append(example)
    for side, name in zip(sides, ("training", "validation"), strict=True):
        if not side:
            raise ValueError(
                f"the {name} side of {len(examples)} rows is empty at "
                f"validation_fraction={validation_fraction}; use more rows or another fraction"
            )
    training, validation = (ExampleSet(tuple(side), examples.max_length) for side in sides)
    return training, validation


def training_batches(
    examples: ExampleSet,
    batch_size: int,
    seed: int,
    *,
    features: RowFeatures | None = None,
    held: Collection[int] | None = None,
) -> grain.DatasetIterator:
    """Returns an endless iterator over shuffled batches, with `get_state` and `set_state`.

    Each epoch has its own order; an epoch's tail and the next one's head share a batch. Batches
    depend on the arguments before `features` only, so several processes draw the same ones.

    Args:
        examples: the rows.
        batch_size: rows in a batch.
        seed: of the order.
        features: adds `features` to each batch.
        held: positions in a batch whose features this process needs; the others stay 0. None = all.

    Returns:
        Iterator of dicts as `pad_batch` makes them.

    Raises:
        ValueError: batch_size is below 1.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be positive")
    dataset = grain.MapDataset.source(examples).shuffle(seed=seed).repeat()
    dataset = dataset.batch(
        batch_size,
        batch_fn=lambda rows: pad_batch(rows, examples.max_length, features, held=held),
    )
    # One thread is plenty for padding and leaves the cores to the step.
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
    return iter(dataset.to_iter_dataset(options))


def evaluation_batches(
    examples: ExampleSet, batch_size: int, *, features: RowFeatures | None = None
) -> Iterator[dict[str, np.ndarray]]:
    """Yields every row once, in order; the last batch is filled with empty rows.

    An empty row has length 0, response_start 0 and row -1.
    """
    for start in range(0, len(examples), batch_size):
        rows = examples.examples[start : start + batch_size]
        yield pad_batch(rows, examples.max_length, features, batch_size=batch_size)


def pad_batch(
    rows: Sequence[Example],
    max_length: int,
    features: RowFeatures | None = None,
    batch_size: int | None = None,
    held: Collection[int] | None = None,
) -> dict[str, np.ndarray]:
    """Stacks rows into right-padded arrays.

    Args:
        rows: at most `batch_size` of them.
        max_length: S.
        features: target features by row.
        batch_size: B; None is the number of rows.
        held: positions of the rows whose features are read; the others stay 0. None = all.

    Returns:
        tokens [B, S] int32 padded with 0, length [B] int32, response_start [B] int32, row [B] int32
        and, where given, features [B, S, C * D] padded with 0.
    """
    batch_size = len(rows) if batch_size is None else batch_size
    batch = {
        "tokens": np.zeros((batch_size, max_length), np.int32),
        "length": np.zeros((batch_size,), np.int32),
        "response_start": np.zeros((batch_size,), np.int32),
        "row": np.full((batch_size,), -1, np.int32),
    }
    for index, example in enumerate(rows):
        batch["tokens"][index, : len(example.tokens)] = example.tokens
        batch["length"][index] = len(example.tokens)
        batch["response_start"][index] = example.response_start
        batch["row"][index] = example.row
    if features is not None:
        held = range(len(rows)) if held is None else held
        found = {index: features[rows[index].id][: len(rows[index].tokens)] for index in held}
        any_row = next(iter(found.values()))
        stacked = np.zeros((batch_size, max_length, any_row.shape[-1]), any_row.dtype)
        for index, row_features in found.items():
            stacked[index, : len(row_features)] = row_features
        batch["features"] = stacked
    return batch


def _hash_to_unit(text: str) -> float:
    """Returns a number in [0, 1) that depends on the text only."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64
