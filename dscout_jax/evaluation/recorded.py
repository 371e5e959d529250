"""Replayed rows of a trained drafter as one small file, so that a comparison can grow run by run.

A run is recorded with all that it depends on. Whoever has the file need not train again; a file of
another experiment is refused, never mixed in.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dscout_jax.evaluation.replayed import ReplayedRow
from dscout_jax.files import write_text
from dscout_jax.training.checkpoint import changed_fields

Rows = Mapping[str, Sequence[ReplayedRow]]

_COUNTS = ("tokens", "cycles", "free_tokens", "free_cycles")


@dataclasses.dataclass(frozen=True)
class Run:
    """One trained drafter on the evaluation prompts.

    Attributes:
        identity: what the numbers depend on: configuration, data, first weights, prompts.
        trained: how training ended, for people: held-out metrics, environment, drafter digest.
        rows: replayed rows by variant; every variant has the same prompts in the same order.
    """

    identity: Mapping[str, Any]
    trained: Mapping[str, Any]
    rows: Rows


def write_run(path: Path, run: Run) -> None:
    """Writes a run in one step, a list of numbers to a line.

    Raises:
        OSError: the file cannot be written.
    """
    first = next(iter(run.rows.values()))
    columns = {
        f"{name} {count}": [getattr(row, count) for row in rows]
        for name, rows in run.rows.items()
        for count in _COUNTS
    }
    head = {
        "identity": run.identity,
        "trained": run.trained,
        "prompts": [[row.workload, row.prompt_id] for row in first],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in (head | columns).items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_run(path: Path, identity: Mapping[str, Any], ignored: tuple[str, ...] = ()) -> Run | None:
    """Returns a recorded run; None where there is no file.

    Args:
        path: the file.
        identity: what the run must have been made with.
        ignored: dotted fields that may differ.

    Raises:
        ValueError: the file is damaged or of another experiment; the fields are named.
    """
    if not path.is_file():
        return None
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        stored, trained = saved.pop("identity"), saved.pop("trained")
        prompts = saved.pop("prompts")
        names = dict.fromkeys(column.rsplit(" ", 1)[0] for column in saved)
        rows = {
            name: [
                ReplayedRow(workload, prompt_id, *counts)
                for (workload, prompt_id), *counts in zip(
                    prompts, *(saved[f"{name} {count}"] for count in _COUNTS), strict=True
                )
            ]
            for name in names
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is not a recorded run ({error!r}); delete it") from error
    changes = changed_fields(stored, identity, ignored=ignored)
    if changes:
        raise ValueError(
            f"{path} was recorded under other settings: {'; '.join(changes)}. Use its settings or "
            "another output folder"
        )
    return Run(stored, trained, rows)
