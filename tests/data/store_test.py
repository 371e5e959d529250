import subprocess
import sys
import textwrap

import pytest

from dscout_jax.data.responses import Response
from dscout_jax.data.store import build_store, fingerprint_responses, open_store

RESPONSES = [
    Response(f"p/{i}", tuple(range(1, 3 + i)), tuple(range(i, 2 * i + 1)), bool(i % 2))
    for i in range(7)
]


def by_id(responses):
    return sorted(responses, key=lambda response: response.id)


def test_a_store_gives_back_rows_and_settings(tmp_path):
    build_store(RESPONSES, tmp_path / "deep" / "store", {"target": "toy", "temperature": 0.0})
    store = open_store(tmp_path / "deep" / "store")
    assert by_id(store) == RESPONSES
    assert store.settings["target"] == "toy"
    assert store.settings["temperature"] == 0.0
    assert store.settings["fingerprint"] == fingerprint_responses(reversed(RESPONSES))
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["store"]


def test_the_order_of_a_store_depends_on_the_ids_only(tmp_path):
    forward = build_store(RESPONSES, tmp_path / "a", {})
    backward = build_store(RESPONSES[::-1], tmp_path / "b", {})
    assert list(forward) == list(backward)


def test_building_again_replaces_a_store_but_no_other_folder(tmp_path):
    build_store(RESPONSES, tmp_path / "store", {"seed": 1})
    store = build_store(RESPONSES[:3], tmp_path / "store", {"seed": 2})
    assert len(store) == 3
    assert store.settings["seed"] == 2
    (tmp_path / "precious").mkdir()
    with pytest.raises(FileExistsError, match="is not a store"):
        build_store(RESPONSES, tmp_path / "precious", {})


def test_tensorflow_is_never_imported(tmp_path):
    script = textwrap.dedent(
        """
        import sys
        from dscout_jax.data.responses import Response
        from dscout_jax.data.store import build_store, open_store
        build_store([Response("a", (1,), (2, 3), True)], sys.argv[1], {})
        assert open_store(sys.argv[1])[0].response == (2, 3)
        assert "tensorflow" not in sys.modules
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "store")], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == ""


def test_missing_store_no_rows_and_equal_ids_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no response store in .*generate_responses"):
        open_store(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no responses"):
        build_store([], tmp_path / "store", {})
    with pytest.raises(ValueError, match="share an id"):
        build_store([RESPONSES[0], RESPONSES[0]], tmp_path / "store", {})
    assert not (tmp_path / "store").exists()
