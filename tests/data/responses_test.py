import os
import signal
import subprocess
import sys
import textwrap

import pytest

from dscout_jax.data.responses import (
    Response,
    ResponseWriter,
    iter_responses,
    read_responses,
    read_settings,
)

SETTINGS = {"target": "toy", "temperature": 0.0, "stop_ids": (2, 3)}


def make_response(index):
    return Response(f"p/{index}", (1, index), tuple(range(index + 1)), bool(index % 2))


def write(path, indices, settings=SETTINGS):
    with ResponseWriter(path, settings) as writer:
        writer.append(make_response(i) for i in indices)


def test_what_is_written_is_read_back_and_known_as_done(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    write(path, range(3))
    assert list(iter_responses(path)) == [make_response(i) for i in range(3)]
    with ResponseWriter(path, SETTINGS) as writer:
        assert writer.done == {"p/0", "p/1", "p/2"}
        writer.append([make_response(3)])
    assert read_responses([path]) == [make_response(i) for i in range(4)]
    assert read_settings(path)["target"] == "toy"


def test_a_torn_last_line_is_cut_wherever_it_was_torn(tmp_path):
    path = tmp_path / "answers.jsonl"
    write(path, range(3))
    whole = path.read_bytes()
    second_line = whole.index(b"\n") + 1
    for size in range(second_line, len(whole)):
        path.write_bytes(whole[:size])
        num_left = whole[:size].count(b"\n")
        assert len(read_responses([path])) == num_left
        with ResponseWriter(path, SETTINGS) as writer:
            assert len(writer.done) == num_left
            writer.append(make_response(i) for i in range(num_left, 3))
        assert path.read_bytes() == whole


def test_a_torn_line_longer_than_one_read_is_cut(tmp_path):
    path = tmp_path / "answers.jsonl"
    write(path, [0])
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id": "' + b"x" * 200_000)
    ResponseWriter(path, SETTINGS).close()
    assert path.read_bytes() == whole


def test_kill_9_while_writing_loses_no_finished_row_and_doubles_none(tmp_path):
    path = tmp_path / "answers.jsonl"
    script = textwrap.dedent(
        """
        import sys
        from dscout_jax.data.responses import Response, ResponseWriter
        with ResponseWriter(sys.argv[1], {"target": "toy"}) as writer:
            for i in range(10**9):
                if str(i) not in writer.done:
                    writer.append([Response(str(i), (1,) * 50, (2,) * 5000, True)])
                    print(i, flush=True)
        """
    )
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
        )
        acknowledged = [int(child.stdout.readline()) for _ in range(20)]
        os.kill(child.pid, signal.SIGKILL)
        acknowledged += [int(line) for line in child.stdout.read().split()]
        child.wait()
        child.stdout.close()
        with ResponseWriter(path, {"target": "toy"}) as writer:  # also: the lock died with it
            done = writer.done
        ids = [int(r.id) for r in iter_responses(path)]
        assert ids == list(range(len(ids)))
        assert done == {str(i) for i in ids}
        assert set(acknowledged) <= set(ids)


def test_other_settings_are_refused_with_the_names_of_the_fields(tmp_path):
    path = tmp_path / "answers.jsonl"
    write(path, [0])
    before = path.read_bytes()
    other = {"target": "toy", "temperature": 1.0, "stop_ids": (2, 3), "seed": 7}
    with pytest.raises(ValueError, match=r"seed is 'absent' there and 7 here; temperature is 0.0"):
        ResponseWriter(path, other)
    assert path.read_bytes() == before


def test_answers_without_settings_beside_them_are_not_written_to(tmp_path):
    path = tmp_path / "answers.jsonl"
    write(path, [0])
    (tmp_path / "answers.meta.json").unlink()
    with pytest.raises(ValueError, match=r"answers\.meta\.json is missing"):
        ResponseWriter(path, SETTINGS)


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    with (
        ResponseWriter(path, SETTINGS),
        pytest.raises(BlockingIOError, match="another process"),
    ):
        ResponseWriter(path, SETTINGS)


def test_an_answered_id_is_not_written_again(tmp_path):
    path = tmp_path / "answers.jsonl"
    write(path, [0])
    with (
        ResponseWriter(path, SETTINGS) as writer,
        pytest.raises(ValueError, match="'p/0' is already answered"),
    ):
        writer.append([make_response(0)])


def test_of_equal_ids_in_several_files_the_first_is_kept(tmp_path):
    write(tmp_path / "a.jsonl", [0, 1])
    with ResponseWriter(tmp_path / "b.jsonl", SETTINGS) as writer:
        writer.append([Response("p/1", (9,), (9,), True), make_response(2)])
    merged = read_responses([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert merged == [make_response(i) for i in range(3)]


@pytest.mark.parametrize(
    "line",
    ['{"id": "x"', '{"id": "x", "prompt": [1], "response": [2]}', "[]", "\x00",
     '{"id": "x", "prompt": [1], "response": ["a"], "stopped": true}',
     '{"id": 5, "prompt": [1], "response": [2], "stopped": true}'],
)  # fmt: skip
def test_a_malformed_whole_line_names_file_and_line(tmp_path, line):
    path = tmp_path / "answers.jsonl"
    write(path, [0])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl, line 2: "):
        read_responses([path])
