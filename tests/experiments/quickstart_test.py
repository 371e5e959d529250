"""Quickstart on a tiny random target; the real model runs in CI's smoke command."""

import dataclasses
import importlib.util
import json
import pathlib
import subprocess
import sys

import gguf
import jax
import pytest
import safetensors.numpy
from tokenizers.pre_tokenizers import ByteLevel

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.models.drafter import init_drafter
from dscout_jax.models.target import init_target
from dscout_jax.weights.dflash import WEIGHTS_FILE, export_drafter
from dscout_jax.weights.download import WeightsError
from dscout_jax.weights.gguf import Vocabulary
from dscout_jax.weights.targets import LoadedTarget

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "experiments" / "quickstart.py"
SHARED = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "vocab_size": 258,
}
TARGET = TargetConfig(
    **SHARED,
    num_hidden_layers=3,
    tie_word_embeddings=True,
    qk_norm=False,
    max_position_embeddings=4096,
)
DRAFTER = DrafterConfig(
    **SHARED,
    num_hidden_layers=1,
    num_target_layers=3,
    target_layer_ids=(0, 1),
    mask_token_id=0,
    block_size=4,
)
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def quickstart():
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def target() -> LoadedTarget:
    vocabulary = Vocabulary(
        tokens=("<s>", "</s>", *sorted(ByteLevel.alphabet())),
        token_types=(gguf.TokenType.CONTROL,) * 2 + (gguf.TokenType.NORMAL,) * 256,
        merges=(),
        model="gpt2",
        pre="smollm",
        chat_template=TEMPLATE,
        bos_id=0,
        eos_id=1,
        pad_id=None,
        unk_id=None,
    )
    return LoadedTarget(
        "tiny", TARGET, init_target(jax.random.key(0), TARGET), vocabulary, "0" * 64
    )


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("drafter")
    return str(export_drafter(folder, DRAFTER, init_drafter(jax.random.key(1), DRAFTER)))


@pytest.fixture
def run(quickstart, target, drafter, monkeypatch, tmp_path):
    """Runs quickstart with the tiny models; results go to tmp_path/out."""
    monkeypatch.setattr(quickstart, "load_target", lambda name: target)

    def call(*arguments: str) -> int:
        base = ["--drafter", drafter, "--output", str(tmp_path / "out"), "--max_new_tokens", "12"]
        return quickstart.main([*base, *arguments])

    return call


def test_a_run_leaves_rows_table_summary_and_pictures(run, tmp_path, capsys):
    code = run(
        *("--workloads", "chat", "math_word", "--num_prompts", "1"),
        *("--block_size", "2", "4", "--json", str(tmp_path / "all.json")),
    )
    assert code == 0
    out = tmp_path / "out"
    assert sorted(file.name for file in out.iterdir()) == [
        "accepted_lengths.png",
        "rows.csv",
        "rows.jsonl",
        "summary.json",
        "table.md",
        "tokens_per_second.png",
    ]
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [(r["workload"], r["turn"], r["block_size"]) for r in rows] == [
        *(("chat", 0, 2), ("chat", 0, 4), ("chat", 1, 2), ("chat", 1, 4)),
        *(("math_word", 0, 2), ("math_word", 0, 4)),
    ]
    summary = json.loads((out / "summary.json").read_text())
    wanted = "mat_pooled mat_macro mat_loop_free speedup speedup_loop_free identical near_ties"
    for workload in ("chat", "math_word"):
        assert set(wanted.split()) <= summary["workloads"][workload].keys()
        assert set(summary["workloads"][workload]["by_block_size"]) == {"2", "4"}
    assert summary["complete"] is True
    assert summary["speedup_mean"] > 0 and summary["speedup_mean_loop_free"] > 0
    assert {"machine", "versions", "seeds", "git_revision", "settings"} <= summary.keys()
    assert json.loads((tmp_path / "all.json").read_text())["rows"] == rows
    assert "identical" in capsys.readouterr().out


def test_an_interrupt_keeps_what_was_measured(run, quickstart, monkeypatch, tmp_path, capsys):
    measure = quickstart.measure_prompt

    def interrupted(prompt, **rest):
        if prompt.workload == "instructions":
            raise KeyboardInterrupt
        return measure(prompt, **rest)

    monkeypatch.setattr(quickstart, "measure_prompt", interrupted)
    code = run(
        "--workloads", "math_word", "instructions", "--num_prompts", "1", "--block_size", "4"
    )
    assert code == 130
    assert "1 measurements are kept" in capsys.readouterr().err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["complete"] is False
    assert list(summary["workloads"]) == ["math_word"]


def test_a_difference_that_is_no_near_tie_fails_the_run(run, quickstart, monkeypatch, capsys):
    plain = quickstart.Runners.plain

    def wrong(self, *arguments):
        answer = plain(self, *arguments)
        return dataclasses.replace(answer, tokens=(*answer.tokens[:-1], answer.tokens[-1] ^ 2))

    monkeypatch.setattr(quickstart.Runners, "plain", wrong)
    monkeypatch.setattr(quickstart.Runners, "margin", lambda self, ids, candidates: 0.7)
    assert run("--workloads", "math_word", "--num_prompts", "1", "--block_size", "4") == 1
    assert "DIFFERENCE: math_word/0" in capsys.readouterr().out


def test_a_prompt_streams_its_answer_with_accepted_runs_in_brackets(run, capsys):
    assert run("--prompt", "hello", "--block_size", "4") == 0
    assert "over" in capsys.readouterr().err


def test_accepted_drafts_stand_between_the_marks(quickstart, target):
    tokenizer = quickstart.Tokenizer(target.vocabulary)
    decoder = quickstart.StreamDecoder(tokenizer)
    shown = [
        quickstart.mark_accepted(tokenizer.encode(text), decoder, ("[", "]"))
        for text in ("a", "bcd", "ef")
    ]
    assert shown == ["a", "[bc]d", "[e]f"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target=gpt9"], "--target=gpt9 is unknown; allowed: smollm2-135m"),
        (["--prompt= "], "--prompt is empty"),
        (["--prompt=a", "--benchmarks=x"], "exclude each other"),
        (["--prompt=a", "--smoke"], "--smoke has no meaning with --prompt"),
        (["--block_size=5"], "--block_size=5 is not allowed"),
        (["--block_size=1"], "trained for block sizes 2 to 4"),
        (["--num_prompts=0"], "--num_prompts=0 must be at least 1"),
        (["--workloads=gsm8k"], "'gsm8k' is unknown; allowed: math_word"),
        (["--benchmarks=/no/such"], "--benchmarks=/no/such is no folder"),
        (["--output=/dev/null/x"], "cannot write in /dev/null/x"),
        (["--json=/no/such/x.json"], "--json=/no/such/x.json cannot be written"),
        (["--drafter=/no/such"], "no drafter at /no/such"),
        (["--max_context=64"], "the cache holds 64"),
        (["--prompt=" + "long " * 900, "--max_context=2048"], "the cache holds 2048"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, tmp_path, capsys, arguments, message):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err.splitlines()[-1]
    assert captured.out == ""
    assert not list(tmp_path.glob("out/*"))


def test_a_flag_that_does_not_exist_is_one_line_and_exit_code_2(quickstart, capsys):
    with pytest.raises(SystemExit) as exit_info:
        quickstart.main(["--block_sizes", "8"])
    assert exit_info.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_drafter_for_another_target_is_refused(run, tmp_path, capsys):
    other = dataclasses.replace(DRAFTER, hidden_size=16, num_target_layers=5)
    folder = export_drafter(tmp_path / "other", other, init_drafter(jax.random.key(1), other))
    assert run("--drafter", str(folder), "--num_prompts=1") == 2
    message = capsys.readouterr().err
    assert "hidden_size is 16, the target's is 32" in message
    assert "num_target_layers is 5, the target's is 3" in message


def test_drafter_weights_with_wrong_names_are_refused(run, drafter, tmp_path, capsys):
    folder = tmp_path / "renamed"
    folder.mkdir()
    (folder / "config.json").write_text((pathlib.Path(drafter) / "config.json").read_text())
    tensors = safetensors.numpy.load_file(pathlib.Path(drafter) / WEIGHTS_FILE)
    tensors["fd.weight"] = tensors.pop("fc.weight")
    safetensors.numpy.save_file(tensors, folder / WEIGHTS_FILE)
    assert run("--drafter", str(folder)) == 2
    assert "missing ['fc.weight'], unused ['fd.weight']" in capsys.readouterr().err


def test_a_target_that_cannot_be_fetched_is_one_line(run, quickstart, monkeypatch, capsys):
    def offline(name):
        raise WeightsError("no network")

    monkeypatch.setattr(quickstart, "load_target", offline)
    assert run("--num_prompts=1") == 2
    assert capsys.readouterr().err.splitlines()[-1] == "quickstart: no network"


def test_the_script_runs_from_any_folder_without_installation(tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, "--target=gpt9"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == "quickstart: --target=gpt9 is unknown; allowed: smollm2-135m\n"
    assert list(tmp_path.iterdir()) == []


def test_own_prompts_are_eight_a_workload_and_chat_has_two_turns(quickstart):
    for workload in quickstart.OWN_WORKLOADS:
        prompts = quickstart.load_benchmark(quickstart.OWN_PROMPTS, workload)
        assert len(prompts) == 8
        assert {len(prompt.turns) for prompt in prompts} == ({2} if workload == "chat" else {1})
