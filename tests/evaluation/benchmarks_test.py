import json

import pytest

from dscout_jax.data.prompts import Prompt
from dscout_jax.evaluation.benchmarks import (
    Generated,
    as_row,
    compare,
    first_difference,
    measure_prompt,
)


class Letters:
    """A tokenizer of one letter a token; a prompt is all messages in a row."""

    def chat_prompt(self, messages):
        return [
            ord(c) for message in messages for c in f"{message['role'][0]}:{message['content']};"
        ]

    def decode(self, ids, *, skip_special=False):
        return "".join(map(chr, ids))


def says(text, cycles, seconds=1.0):
    def decode(prompt_ids, max_new_tokens):
        return Generated(tuple(map(ord, text)), tuple(cycles), 0.1, seconds)

    return decode


def never(tokens):
    raise AssertionError("nothing differs, so no logits are needed")


def measure(prompt, plain, speculative, margin=never):
    return list(
        measure_prompt(
            prompt,
            tokenizer=Letters(),
            plain=plain,
            speculative=speculative,
            margin=margin,
            max_new_tokens=8,
        )
    )


def test_every_turn_is_measured_at_every_block_size():
    prompt = Prompt("p", "chat", ("hi", "more"))
    speculative = {4: says("abcde", [4]), 8: says("abcde", [2, 2])}
    found = measure(prompt, says("abcde", [1, 1, 1, 1]), speculative)
    assert [(m.answer.turn, m.block_size) for m in found] == [(0, 4), (0, 8), (1, 4), (1, 8)]
    assert all(m.answer.divergence is None for m in found)


def test_the_plain_answer_stays_in_the_context_of_the_next_turn():
    seen = []

    def plain(prompt_ids, max_new_tokens):
        seen.append("".join(map(chr, prompt_ids)))
        return Generated((ord("A"), ord("!")), (1,), 0.1, 1.0)

    measure(Prompt("p", "chat", ("one", "two")), plain, {4: says("A!", [1])})
    assert seen == ["u:one;", "u:one;a:A!;u:two;"]


def test_an_empty_answer_ends_the_conversation():
    found = measure(Prompt("p", "chat", ("one", "two")), says(" ", []), {4: says(" ", [])})
    assert [m.answer.turn for m in found] == [0]


@pytest.mark.parametrize(("gap", "is_near_tie"), [(1e-5, True), (0.4, False)])
def test_a_difference_is_looked_up_where_it_begins(gap, is_near_tie):
    asked = []

    def margin(tokens, candidates):
        asked.append((list(tokens), list(candidates)))
        return gap

    plain = Generated((1, 2, 3, 4), (1, 1, 1), 0.1, 1.0)
    speculative = Generated((1, 2, 9, 9), (3,), 0.1, 1.0)
    answer = compare("p", 0, [7, 8], plain, speculative, margin)
    assert asked == [([7, 8, 1, 2], [3, 9])]
    assert (answer.divergence, answer.margin, answer.is_near_tie) == (2, gap, is_near_tie)


def test_an_answer_that_merely_ends_is_never_a_near_tie():
    plain = Generated((1, 2, 3), (1, 1), 0.1, 1.0)
    speculative = Generated((1, 2), (1,), 0.1, 1.0)
    answer = compare("p", 0, [7, 8], plain, speculative, never)
    assert (answer.divergence, answer.is_near_tie) == (2, False)


@pytest.mark.parametrize(
    ("first", "second", "index"),
    [("abc", "abc", None), ("abc", "abd", 2), ("abc", "ab", 2), ("", "a", 0), ("", "", None)],
)
def test_the_first_difference_counts_a_missing_tail(first, second, index):
    assert first_difference(first, second) == index


def test_a_row_is_plain_json():
    prompt = Prompt("p", "chat", ("hi",))
    (found,) = measure(prompt, says("abcde", [1] * 4), {4: says("abcde", [3, 1])})
    row = json.loads(json.dumps(as_row(found)))
    assert (row["mat"], row["num_cycles"], row["cycles"], row["text"]) == (2.0, 2, [3, 1], "abcde")
