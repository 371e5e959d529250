import lzma

import pytest

from dscout_jax.data.packed import is_packed, read_packed, write_packed
from dscout_jax.data.responses import Response

ROWS = [
    Response("a/1", (1, 4, 9), (5, 6, 2), True),
    Response("b/2", (1, 4), tuple(range(300)), False),
]
PROMPTS = {row.id: row.prompt for row in ROWS}
SETTINGS = {"target_sha256": "abc", "temperature": 0.0}


def known(prompts):
    return lambda ids: {i: prompts[i] for i in ids if i in prompts}


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "answers.jsonl.xz"
    write_packed(path, ROWS, SETTINGS)
    return path


def test_rows_come_back_whole_and_prompts_are_not_in_the_file(packed):
    assert read_packed(packed, known(PROMPTS)) == (ROWS, SETTINGS)
    assert b'prompt"' not in lzma.decompress(packed.read_bytes())
    assert is_packed(packed) and not is_packed("answers.jsonl")


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ({"a/1": (1, 4, 9)}, "1 prompts are missing, first 'b/2'"),
        (PROMPTS | {"a/1": (1, 4, 8)}, "answers other prompts, or the chat template has changed"),
    ],
)
def test_other_prompts_are_refused(packed, prompts, message):
    with pytest.raises(ValueError, match=message):
        read_packed(packed, known(prompts))


@pytest.mark.parametrize("damage", ["cut", "row lost", "no header"])
def test_damaged_files_are_refused(packed, damage):
    content = packed.read_bytes()
    lines = lzma.decompress(content).splitlines(keepends=True)
    content = {
        "cut": content[:-20],
        "row lost": lzma.compress(b"".join(lines[:-1])),
        "no header": lzma.compress(b"".join(lines[1:])),
    }[damage]
    packed.write_bytes(content)
    with pytest.raises(ValueError, match="does not hold packed answers|header says 2"):
        read_packed(packed, known(PROMPTS))


def test_missing_files_and_other_names_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no packed answers"):
        read_packed(tmp_path / "none.jsonl.xz", known(PROMPTS))
    with pytest.raises(ValueError, match="does not end with .jsonl.xz"):
        write_packed(tmp_path / "answers.gz", ROWS, SETTINGS)
