import json

import pytest

from dscout_jax.data.prompts import (
    BENCHMARK_WRAPPERS,
    MixturePart,
    load_benchmark,
    load_prompt_file,
    load_training_prompts,
)

MIXTURE = {
    "maths": MixturePart(0.5, ("gsm8k_train",)),
    "code": MixturePart(0.25, ("mbpp_train",)),
    "chat": MixturePart(0.25, ("dolly_nocontext", "self_instruct_seed")),
}


def write_prompts(path, stem, count):
    path.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"id": f"{stem}/{i}", "turns": [f"question {i}"]}) for i in range(count)]
    (path / f"{stem}.jsonl").write_text("\n".join(lines) + "\n")


@pytest.fixture
def data_dir(tmp_path):
    counts = {"gsm8k_train": 40, "mbpp_train": 30, "dolly_nocontext": 20, "self_instruct_seed": 10}
    for stem, count in counts.items():
        write_prompts(tmp_path / "train_prompts", stem, count)
    return tmp_path


def test_every_prefix_of_the_training_prompts_has_the_mixtures_shares(data_dir):
    prompts = load_training_prompts(data_dir, MIXTURE)
    assert len({p.id for p in prompts}) == 100
    for stop in (4, 20, 60):
        counts = [sum(p.workload == name for p in prompts[:stop]) for name in MIXTURE]
        assert counts == [stop // 2, stop // 4, stop // 4]
    # Two sources of one part mix in proportion to their sizes, they do not follow one another.
    chat = [p.id.split("/")[0] for p in prompts if p.workload == "chat"]
    assert set(chat[:10]) == {"dolly_nocontext", "self_instruct_seed"}


def test_the_order_of_training_prompts_depends_on_the_seed_only(data_dir):
    first = load_training_prompts(data_dir, MIXTURE, seed=1)
    assert first == load_training_prompts(data_dir, MIXTURE, seed=1)
    other = load_training_prompts(data_dir, MIXTURE, seed=2)
    assert first != other
    assert sorted(p.id for p in first) == sorted(p.id for p in other)


def test_maths_prompts_carry_the_boxed_wrapper_and_others_are_raw(data_dir):
    by_id = {p.id: p.turns[0] for p in load_training_prompts(data_dir, MIXTURE)}
    boxed = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert by_id["gsm8k_train/3"] == "question 3" + boxed
    assert by_id["mbpp_train/3"] == "question 3"


def test_a_benchmark_has_its_wrapper_and_keeps_all_turns(tmp_path):
    for stem in ("humaneval", "mt_bench"):
        write_prompts(tmp_path, stem, 3)
    (tmp_path / "mt_bench.jsonl").write_text('{"id": "a", "turns": ["one", "two"]}\n')
    humaneval = load_benchmark(tmp_path, "humaneval", seed=None)
    assert humaneval[1].turns == (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\nquestion 1\n```",
    )
    (chat,) = load_benchmark(tmp_path, "mt_bench")
    assert chat.turns == ("one", "two")
    assert chat.workload == "mt_bench"


def test_a_smaller_limit_takes_a_prefix_of_a_larger_one(tmp_path):
    write_prompts(tmp_path, "gsm8k", 30)
    ten = load_benchmark(tmp_path, "gsm8k", limit=10, seed=3)
    assert ten == load_benchmark(tmp_path, "gsm8k", limit=20, seed=3)[:10]
    assert [p.id for p in ten] != [p.id for p in load_benchmark(tmp_path, "gsm8k", 10, seed=None)]


def test_the_prompts_in_the_repository_load(pytestconfig):
    folder = pytestconfig.rootpath / "experiments" / "prompts"
    files = sorted(folder.glob("*.jsonl"))
    assert files
    for path in files:
        assert path.stem in BENCHMARK_WRAPPERS
        assert len(load_benchmark(folder, path.stem)) >= 8


def test_a_missing_folder_or_file_says_where_prompts_are_expected(tmp_path, data_dir):
    with pytest.raises(FileNotFoundError, match=r"nowhere/train_prompts.*--data_dir"):
        load_training_prompts(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"train_prompts/aqua\.jsonl"):
        load_training_prompts(data_dir, {"other": MixturePart(1.0, ("aqua",))})


def test_an_unknown_benchmark_lists_the_allowed_names(tmp_path):
    with pytest.raises(ValueError, match=r"unknown benchmark 'gsm9k'; allowed: .*gsm8k"):
        load_benchmark(tmp_path, "gsm9k")


@pytest.mark.parametrize(
    "line",
    ['{"id": "x", "turns": ["a"]', '{"turns": ["a"]}', '{"id": "x", "turns": []}', "[1]",
     '{"id": "x", "turns": ["  "]}', '{"id": "x", "turns": "a"}', '{"id": "a", "turns": ["b"]}'],
)  # fmt: skip
def test_a_malformed_line_names_file_and_line(tmp_path, line):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text('{"id": "a", "turns": ["b"]}\n\n' + line + "\n")
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl, line 3: "):
        load_prompt_file(path)


def test_a_mixture_with_a_shared_source_or_no_share_is_refused(data_dir):
    twice = {"a": MixturePart(1, ("mbpp_train",)), "b": MixturePart(1, ("mbpp_train",))}
    with pytest.raises(ValueError, match="'mbpp_train' stands in 'a' and in 'b'"):
        load_training_prompts(data_dir, twice)
    with pytest.raises(ValueError, match="share=0 must be above 0"):
        load_training_prompts(data_dir, {"a": MixturePart(0, ("mbpp_train",))})
