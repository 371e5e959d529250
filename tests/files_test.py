import json
import pathlib

import pytest

from dscout_jax.files import require_writable, write_json


def test_json_is_strict(tmp_path):
    write_json(tmp_path / "a.json", {"x": float("nan"), "y": (1.5, [float("inf")])})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1.5, [None]]}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below", pathlib.Path("/proc/x")):
        with pytest.raises(ValueError, match="cannot write in .*give a directory"):
            require_writable(directory)
