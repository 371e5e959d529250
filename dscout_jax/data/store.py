"""Response store: a TFDS data set in array_record files, built and read without TensorFlow.

The JSON-lines files are what generation appends to; the store is what training opens: random
access by row, checked shards, and the settings that made it in its metadata. Rows lie in an order
that depends on their ids only.
"""

import contextlib
import hashlib
import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from dscout_jax.data.responses import Response
from dscout_jax.files import require_writable

STORE_NAME = "dscout_responses"


class DscoutResponses(tfds.core.GeneratorBasedBuilder):
    """Prompts with the target's answers, as token ids."""

    name = STORE_NAME
    VERSION = tfds.core.Version("1.0.0")

    def __init__(
        self,
        *,
        responses: Sequence[Response] = (),
        settings: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ):
        self._responses = responses
        self._settings = dict(settings or {})
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        token_ids = tfds.features.Tensor(shape=(None,), dtype=np.int32)
        return tfds.core.DatasetInfo(
            builder=self,
            description="Prompts with the target's answers, as token ids.",
            features=tfds.features.FeaturesDict(
                {
                    "id": tfds.features.Text(),
                    "prompt": token_ids,
                    "response": token_ids,
                    "stopped": np.bool_,
                }
            ),
            metadata=tfds.core.MetadataDict(self._settings),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for response in self._responses:
            yield (
                response.id,
                {
                    "id": response.id,
                    "prompt": np.asarray(response.prompt, np.int32),
                    "response": np.asarray(response.response, np.int32),
                    "stopped": response.stopped,
                },
            )


class ResponseStore(Sequence[Response]):
    """An opened store: a sequence of responses, read from disk on access.

    Attributes:
        settings: what `build_store` was given, with `num_responses` and `fingerprint` added.
    """

    def __init__(self, source: Sequence[Mapping[str, Any]], settings: dict[str, Any]):
        self._source = source
        self.settings = settings

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Response:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} is not in a store of {len(self)} rows")
        record = self._source[index % len(self)]
        return Response(
            id=record["id"].decode(),
            prompt=tuple(record["prompt"].tolist()),
            response=tuple(record["response"].tolist()),
            stopped=bool(record["stopped"]),
        )


def fingerprint_responses(responses: Iterable[Response]) -> str:
    """Returns a sha256 over ids and tokens that does not depend on the order of the rows."""
    digests = sorted(
        hashlib.sha256(
            repr((r.id, tuple(r.prompt), tuple(r.response), bool(r.stopped))).encode()
        ).digest()
        for r in responses
    )
    return hashlib.sha256(b"".join(digests)).hexdigest()


def require_store_place(store_dir: str | Path) -> None:
    """Proves that a store can be made at `store_dir`, before the hours that its rows may take.

    Raises:
        FileExistsError: `store_dir` exists and is not a store.
        ValueError: the folder that is to hold it cannot be written.
    """
    store_dir = Path(store_dir)
    if store_dir.exists() and not (store_dir / "dataset_info.json").is_file():
        raise FileExistsError(f"{store_dir} exists and is not a store; give another folder")
    require_writable(store_dir.absolute().parent)


def build_store(
    responses: Sequence[Response], store_dir: str | Path, settings: Mapping[str, Any]
) -> ResponseStore:
    """Writes the responses as a store and opens it.

    The store is made in a neighbouring folder and renamed at the end, so `store_dir` is a whole
    store or does not exist. An earlier store there is replaced.

    Args:
        responses: the rows; their ids must differ.
        store_dir: folder of the store.
        settings: JSON values kept as metadata (target, template, temperature and so on).

    Raises:
        ValueError: no responses, or an id occurs twice.
        FileExistsError, ValueError: see `require_store_place`.
    """
    store_dir = Path(store_dir)
    if not responses:
        raise ValueError(f"no responses to store in {store_dir}")
    if len({response.id for response in responses}) != len(responses):
        raise ValueError("the responses to store share an id; read_responses drops such rows")
    require_store_place(store_dir)
    metadata = {
        **settings,
        "num_responses": len(responses),
        "fingerprint": fingerprint_responses(responses),
    }
    with tempfile.TemporaryDirectory(prefix=f".{store_dir.name}-", dir=store_dir.parent) as folder:
        builder = DscoutResponses(
            responses=responses,
            settings=metadata,
            data_dir=folder,
            file_format="array_record",  # the default, tfrecord, needs TensorFlow
        )
        # TFDS prints that it downloads, which it does not, and draws bars of its own.
        tfds.disable_progress_bar()
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
        if store_dir.exists():
            shutil.rmtree(store_dir)
        Path(builder.data_dir).rename(store_dir)
    return open_store(store_dir)


def open_store(store_dir: str | Path) -> ResponseStore:
    """Opens a store made by `build_store`.

    Raises:
        FileNotFoundError: no store there.
        ValueError: it holds another number of rows than its metadata says.
    """
    store_dir = Path(store_dir)
    if not (store_dir / "dataset_info.json").is_file():
        raise FileNotFoundError(
            f"no response store in {store_dir}; build one with "
            "experiments/generate_responses.py --store"
        )
    builder = tfds.builder_from_directory(str(store_dir))
    source = builder.as_data_source("train")
    settings = dict(builder.info.metadata)
    if len(source) != settings["num_responses"]:
        raise ValueError(
            f"{store_dir} holds {len(source)} rows, its metadata says "
            f"{settings['num_responses']}; build it again"
        )
    return ResponseStore(source, settings)
