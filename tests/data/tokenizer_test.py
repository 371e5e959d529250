import dataclasses
import json
import pathlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from dscout_jax.data.tokenizer import StreamDecoder, Tokenizer
from dscout_jax.weights.gguf import Vocabulary

SHARED_DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TEXTS = [
    "Natalia sold 48 clips in April and 1234567890.5 in May.",
    "Fenêtre, größer, niño, Łódź, cafe\u0301",
    "投机解码很快。你好，世界！",
    "emoji 🙂👩‍👩‍👧 flags 🇫🇷 and ①②③ ٣٤٥",
    "def f(x):\n\treturn [i ** 2 for i in range(10)]  # ok\n\n\n    # four spaces  \r\n",
    " leading and trailing ",
    "\n",
    "",
]
# The wrappers under which the stored prompts were made, by the first part of their id.
MATHS = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CODE = (
    "Write a solution to the following problem and make sure that it passes the tests:\n"
    "```python\n{}\n```"
)
WRAPPERS = {"gsm8k": MATHS, "math": MATHS, "cpython_stdlib": CODE}


def read_rows(path):
    # Not splitlines: prompts hold raw U+2028 and U+0085, at which it would cut.
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.fixture(scope="module")
def vocabulary(smollm2) -> Vocabulary:
    return smollm2.vocabulary


@pytest.fixture(scope="module")
def tokenizer(vocabulary) -> Tokenizer:
    return Tokenizer(vocabulary)


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_unchanged(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_digit_is_a_token_of_its_own(tokenizer):
    # Cut off before anything else is split: the spaces in front stay together.
    ids = tokenizer.encode("a  2024")
    assert [tokenizer.piece(i) for i in ids] == [b"a", b"  ", b"2", b"0", b"2", b"4"]


def test_spelled_out_control_tokens_become_control_tokens(tokenizer):
    assert len(tokenizer.special_ids) == 17
    text = "a<|im_end|>\n<|im_start|>user"
    ids = tokenizer.encode(text)
    assert ids.count(2) == 1 and ids.count(1) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=True) == "a\nuser"


def test_the_turn_end_is_the_stop_token(tokenizer):
    assert tokenizer.stop_ids == (2,)
    assert tokenizer.piece(2) == b"<|im_end|>"


def test_decoding_equals_the_tokenizers_librarys(tokenizer):
    tokenizer._fast.decoder = decoders.ByteLevel()
    rng = np.random.default_rng(0)
    for row in rng.integers(0, tokenizer.vocab_size, size=(50, 40)):
        theirs = tokenizer._fast.decode(row.tolist(), skip_special_tokens=False)
        assert tokenizer.decode(row) == theirs


def test_text_that_the_vocabulary_cannot_express_is_an_error_not_a_hole(tokenizer):
    with pytest.raises(ValueError, match=r"cannot express '\\x04' \(position 4\)"):
        tokenizer.encode("good\x04bad")


@pytest.mark.parametrize("bad", [-1, 49_152])
def test_an_id_outside_the_vocabulary_is_an_error(tokenizer, bad):
    with pytest.raises(ValueError, match=rf"token id {bad} is outside \[0, 49152\)"):
        tokenizer.decode([1, bad])


def test_a_chat_prompt_has_the_default_system_turn_and_asks_for_the_answer(tokenizer):
    text = tokenizer.decode(tokenizer.chat_prompt([{"role": "user", "content": "Hi"}]))
    assert text == (
        f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_keeps_its_own_system_turn_and_all_turns(tokenizer):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Bye\n")]
    ids = tokenizer.chat_prompt([{"role": role, "content": text} for role, text in turns])
    blocks = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)
    assert tokenizer.decode(ids) == blocks + "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages were given"),
        ([{"role": "user", "content": ""}], "message 0 has content ''"),
        ([{"role": "user", "content": " \n"}], "it must be non-empty text"),
        ([{"role": "user", "content": None}], "message 0 has content None"),
        ([{"role": "robot", "content": "Hi"}], "needs role"),
        ([{"role": "user"}], "needs role"),
    ],
)
def test_empty_or_malformed_messages_are_errors(tokenizer, messages, reason):
    with pytest.raises(ValueError, match=reason):
        tokenizer.chat_prompt(messages)


def test_a_missing_chat_template_is_an_error(vocabulary):
    tokenizer = Tokenizer(dataclasses.replace(vocabulary, chat_template=None))
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.chat_prompt([{"role": "user", "content": "Hi"}])


def test_a_template_that_refuses_the_messages_is_an_error(vocabulary):
    template = "{{ raise_exception('only one turn') }}"
    tokenizer = Tokenizer(dataclasses.replace(vocabulary, chat_template=template))
    with pytest.raises(ValueError, match="refused the messages: only one turn"):
        tokenizer.chat_prompt([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"pre": "qwen2"}, "pre-tokenizer 'qwen2' is not supported; allowed: .*smollm"),
        ({"model": "llama"}, "tokenizer 'llama'"),
        ({"add_bos": True}, "add_bos=True"),
        ({"eos_id": None}, "no eos_id"),
    ],
)
def test_a_vocabulary_that_is_not_implemented_is_refused(vocabulary, change, reason):
    with pytest.raises(ValueError, match=reason):
        Tokenizer(dataclasses.replace(vocabulary, **change))


def test_the_template_digest_changes_with_the_template(vocabulary, tokenizer):
    other = Tokenizer(dataclasses.replace(vocabulary, chat_template="{{ messages }}"))
    assert len(tokenizer.template_sha256) == 64
    assert other.template_sha256 != tokenizer.template_sha256


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(0, 60), max_size=12), skip_special=st.booleans())
def test_streamed_pieces_join_to_the_decoded_text(tokenizer, cuts, skip_special):
    ids = tokenizer.encode("🙂 投机解码 ok ①<|im_end|>\n👩‍👩‍👧é")
    stream = StreamDecoder(tokenizer, skip_special=skip_special)
    edges = [0, *sorted(cuts), len(ids)]
    pieces = [stream.push(ids[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert stream.flush() == ""
    assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_stream_that_ends_inside_a_character_says_so_only_at_the_end(tokenizer):
    ids = next(ids for text in "🙂☃①𝔘" if len(ids := tokenizer.encode(text)) > 1)
    stream = StreamDecoder(tokenizer)
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.push(tokenizer.encode("next")) == "next"


def test_prompt_ids_equal_those_of_an_independent_implementation(tokenizer):
    rows_file = SHARED_DATA / "responses" / "smollm2_greedy.jsonl"
    if not rows_file.exists():
        pytest.skip(f"{rows_file} is not on this machine; it lies beside a developer's checkout")
    rows = read_rows(rows_file)
    rows = rows[:: len(rows) // 200][:200]
    wanted, texts = {row["id"] for row in rows}, {}
    for path in sorted((SHARED_DATA / "train_prompts").glob("*.jsonl")):
        for prompt in read_rows(path):
            if prompt["id"] in wanted:
                texts[prompt["id"]] = prompt["turns"][0]
    assert len(rows) == 200
    for row in rows:
        wrapper = WRAPPERS.get(row["id"].split("/")[0], "{}")
        content = wrapper.format(texts[row["id"]])
        assert tokenizer.chat_prompt([{"role": "user", "content": content}]) == row["prompt"], row[
            "id"
        ]
