"""The target's answers as JSON lines: a killed run loses nothing, reading is strict.

One line is `{"id", "prompt", "response", "stopped"}`; prompt and response are token ids. Beside
`answers.jsonl` lies `answers.meta.json` with the settings that made it, so that answers of two
targets, templates or temperatures never mix in one file.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import logging

from dscout_jax.files import lock_exclusively, write_json


@dataclass(frozen=True)
class Response:
    """One prompt and the target's answer.

    Attributes:
        id: the prompt's id.
        prompt: token ids, chat template included.
        response: token ids; ends with the stop token where `stopped`.
        stopped: whether the target ended the answer itself.
    """

    id: str
    prompt: tuple[int, ...]
    response: tuple[int, ...]
    stopped: bool


class ResponseWriter:
    """Appends responses to a JSON-lines file, whole lines only.

    Opening repairs what a killed run left: bytes after the last newline are a torn line and are cut
    off. Each `append` is one write followed by fsync. The file is locked against a second writer.

    Attributes:
        path: the JSON-lines file.
        done: ids that the file holds.

    Raises (on opening):
        ValueError: the file was written under other settings, or has none beside it, or a line in
            it is malformed.
        BlockingIOError: another process writes to the file.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, Any]):
        """Opens or creates the file.

        Args:
            path: the JSON-lines file; its folder is made where missing.
            settings: what the answers depend on, as JSON values.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")  # noqa: SIM115 (closed by close)
        try:
            lock_exclusively(self._file, str(self.path), "another output file")
            self._check_settings(dict(settings))
            _cut_torn_line(self._file, self.path)
            self.done = {response.id for response in iter_responses(self.path)}
        except BaseException:
            self._file.close()
            raise

    def append(self, responses: Iterable[Response]) -> None:
        """Writes the responses and waits until they are on disk.

        Raises:
            ValueError: an id is already in the file.
        """
        lines = []
        for response in responses:
            if response.id in self.done:
                raise ValueError(f"{self.path}: id {response.id!r} is already answered")
            self.done.add(response.id)
            lines.append(_to_line(response))
        if not lines:
            return
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Releases the file and its lock."""
        self._file.close()

    def __enter__(self) -> "ResponseWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        side_file = settings_path(self.path)
        if side_file.exists():
            check_settings(read_settings(self.path), settings, where=str(self.path))
        elif os.path.getsize(self.path) > 0:
            raise ValueError(
                f"{self.path} holds answers but {side_file.name} is missing beside it, so their "
                "settings are unknown; give another output file"
            )
        else:
            write_json(side_file, settings)


def settings_path(path: str | Path) -> Path:
    """Returns the side file that holds the settings of a JSON-lines file."""
    return Path(path).with_suffix(".meta.json")


def read_settings(path: str | Path) -> dict[str, Any]:
    """Returns the settings under which a JSON-lines file was written.

    Raises:
        FileNotFoundError: the side file is missing.
        ValueError: it is no JSON object.
    """
    side_file = settings_path(path)
    try:
        settings = json.loads(side_file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{side_file}: not a JSON object: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{side_file}: not a JSON object")
    return settings


def check_settings(stored: Mapping[str, Any], given: Mapping[str, Any], where: str) -> None:
    """Compares settings field by field.

    Raises:
        ValueError: they differ; the message names each field with both values.
    """
    given = json.loads(json.dumps(given))  # tuples become lists, as they are stored
    differing = [
        f"{name} is {stored.get(name, 'absent')!r} there and {given.get(name, 'absent')!r} here"
        for name in sorted({*stored, *given})
        if stored.get(name, "absent") != given.get(name, "absent")
    ]
    if differing:
        raise ValueError(
            f"{where} was written under other settings: {'; '.join(differing)}. Use the same "
            "settings or give another path"
        )


def iter_responses(path: str | Path) -> Iterable[Response]:
    """Yields the responses of one file in its order; a torn last line is left out and logged.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a whole line is malformed; the message names file and line.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no responses file {path}; expected JSON lines")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                logging.warning("%s: torn last line %d left out", path, number)
                return
            yield _from_line(line, where=f"{path}, line {number}")


def read_responses(paths: Iterable[str | Path]) -> list[Response]:
    """Reads several files; of responses with the same id the first is kept.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a malformed line.
    """
    by_id: dict[str, Response] = {}
    num_read = 0
    for path in paths:
        for response in iter_responses(path):
            num_read += 1
            by_id.setdefault(response.id, response)
    if num_read > len(by_id):
        logging.info("%d responses with an id seen before left out", num_read - len(by_id))
    return list(by_id.values())


def _cut_torn_line(file: Any, path: Path) -> None:
    """Truncates the file after its last newline."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        logging.warning("%s: cutting a torn last line of %d bytes", path, size - end)
        file.truncate(end)
        file.flush()
        os.fsync(file.fileno())
    file.seek(0, os.SEEK_END)


def _to_line(response: Response) -> str:
    record = {
        "id": response.id,
        "prompt": [int(token) for token in response.prompt],
        "response": [int(token) for token in response.response],
        "stopped": bool(response.stopped),
    }
    return json.dumps(record, separators=(",", ":")) + "\n"


def _from_line(line: bytes, where: str) -> Response:
    try:
        record = json.loads(line)
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
        raise ValueError(f"{where}: not a JSON object: {error}") from error
    try:
        response = Response(
            id=record["id"],
            prompt=tuple(record["prompt"]),
            response=tuple(record["response"]),
            stopped=record["stopped"],
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{where}: a response needs the fields id, prompt, response and stopped ({error!r})"
        ) from error
    if not isinstance(response.id, str) or not isinstance(response.stopped, bool):
        raise ValueError(f"{where}: id must be a text and stopped true or false")
    if not all(type(token) is int for token in response.prompt + response.response):
        raise ValueError(f"{where}: prompt and response must be lists of token ids")
    return response
