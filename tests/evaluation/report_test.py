import json

import pytest

from dscout_jax.evaluation import report


def test_the_environment_is_json_and_names_what_matters():
    environment = json.loads(json.dumps(report.describe_environment()))
    assert environment["machine"]["cores"] >= 1
    assert environment["versions"]["jax"]
    assert "git_revision" in environment


def test_json_is_strict(tmp_path):
    report.write_json(tmp_path / "a.json", {"x": float("nan"), "y": (1.5, [float("inf")])})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": None, "y": [1.5, [None]]}


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.json"
    report.write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        report.write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
