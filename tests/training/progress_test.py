import io

from dscout_jax.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_without_a_terminal_it_writes_whole_lines():
    stream = io.StringIO()
    with Progress(10, start=2, stream=stream) as progress:
        progress.advance(3)  # the first update compiles and tells nothing about the others
        progress.show({"loss": 1.5})
        progress.advance(4)
        progress.show({"loss": 1.25, "tokens/s": 1000.0})
        progress.show({"MAT": 1.5})
        progress.say("a word")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 3/10  loss 1.5  left unknown"
    assert lines[1].startswith("step 4/10  loss 1.25  tokens/s 1000  left 0:0")
    assert "MAT 1.5" in lines[2] and "loss 1.25" in lines[2]
    assert lines[3] == "a word"


def test_on_a_terminal_it_draws_a_bar_and_leaves_a_fresh_line():
    stream = Terminal()
    with Progress(10, start=2, stream=stream) as progress:
        progress.say("a word")
        progress.advance(10)
        progress.show({"loss": 1.25})
    written = stream.getvalue()
    assert "10/10" in written and "loss=1.25" in written and "a word\n" in written
    assert written.endswith("\n")
