"""Answers without their prompts, a hundred bytes a row: small enough to keep beside the code.

An xz file of JSON lines. The first is `{"settings", "num_rows", "prompts_sha256"}`, every other one
`{"id", "response", "stopped"}`. The prompts come from where they are at home, by id; their digest
tells whether prompts and template are still those that were answered.
"""

import hashlib
import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dscout_jax.data.responses import Response
from dscout_jax.files import write_bytes

PACKED_SUFFIX = ".jsonl.xz"

PromptsFn = Callable[[Sequence[str]], Mapping[str, tuple[int, ...]]]


def write_packed(
    path: str | Path, responses: Sequence[Response], settings: Mapping[str, Any]
) -> None:
    """Writes responses without their prompts, in one step.

    Args:
        path: file to write, or to replace; ends with `.jsonl.xz`.
        responses: the rows.
        settings: what the answers depend on, as JSON values.

    Raises:
        ValueError: the name has another ending.
        OSError: the file cannot be written.
    """
    path = Path(path)
    if not is_packed(path):
        raise ValueError(f"{path} does not end with {PACKED_SUFFIX}; give such a name")
    header = {
        "settings": dict(settings),
        "num_rows": len(responses),
        "prompts_sha256": _prompts_sha256(responses),
    }
    rows = ({"id": r.id, "response": list(r.response), "stopped": r.stopped} for r in responses)
    lines = [json.dumps(line, separators=(",", ":")) + "\n" for line in (header, *rows)]
    write_bytes(path, lzma.compress("".join(lines).encode(), preset=9))


def is_packed(path: str | Path) -> bool:
    """Whether a file's name says that it holds packed answers."""
    return str(path).endswith(PACKED_SUFFIX)


def read_packed(path: str | Path, find_prompts: PromptsFn) -> tuple[list[Response], dict[str, Any]]:
    """Returns the responses of a packed file with their prompts, and the settings they depend on.

    Args:
        path: the file.
        find_prompts: takes ids, returns the token ids of those prompts that it knows.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is damaged, or a prompt is missing or not the one that was answered.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no packed answers {path}; expected a {PACKED_SUFFIX} file")
    try:
        lines = lzma.decompress(path.read_bytes()).splitlines()
        header, *rows = [json.loads(line) for line in lines]
        settings, num_rows = dict(header["settings"]), header["num_rows"]
        answers = [(row["id"], tuple(row["response"]), row["stopped"]) for row in rows]
    except (lzma.LZMAError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold packed answers: {error!r}") from error
    if len(answers) != num_rows:
        raise ValueError(f"{path} holds {len(answers)} rows, its header says {num_rows}")
    prompts = find_prompts([row_id for row_id, _, _ in answers])
    unknown = [row_id for row_id, _, _ in answers if row_id not in prompts]
    if unknown:
        raise ValueError(
            f"{path}: {len(unknown)} prompts are missing, first {unknown[0]!r}; give the prompts "
            "that were answered"
        )
    responses = [
        Response(row_id, prompts[row_id], answer, stopped) for row_id, answer, stopped in answers
    ]
    if _prompts_sha256(responses) != header["prompts_sha256"]:
        raise ValueError(f"{path} answers other prompts, or the chat template has changed since")
    return responses, settings


def _prompts_sha256(responses: Sequence[Response]) -> str:
    """Returns a digest over ids and prompts in their order."""
    digest = hashlib.sha256()
    for response in responses:
        digest.update(f"{response.id}:{','.join(map(str, response.prompt))};".encode())
    return digest.hexdigest()
