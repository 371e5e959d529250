"""Replay of benchmark answers against decoding, on the real target with the shipped drafter."""

import pathlib

import pytest

from dscout_jax.data.prompts import Prompt
from dscout_jax.data.tokenizer import Tokenizer
from dscout_jax.decoding.speculative import make_draft_weights
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.replayed import answer_workloads, replay_workloads
from dscout_jax.evaluation.runners import Runners, fit_sizes
from dscout_jax.training.validation import freeze
from dscout_jax.weights.dflash import load_drafter

DRAFTER = pathlib.Path(__file__).parents[2] / "drafters" / "smollm2-135m-dscout"
PROMPTS = {
    "maths": [Prompt("m/1", "maths", ("What is 12 times 11?",), None)],
    "chat": [Prompt("c/1", "chat", ("Name three colours.", "And three more."), None)],
}


def test_replayed_cycles_are_those_of_decoding(smollm2, tmp_path):
    loaded = load_drafter(DRAFTER, smollm2.cfg)
    told = []

    def answer():
        return answer_workloads(
            tmp_path, PROMPTS, smollm2, loaded.config.target_layer_ids,
            max_new_tokens=24, say=told.append, slots=2,
        )  # fmt: skip

    answered = answer()
    assert told[-1] == "answers: 2 of 2"
    frozen = freeze(smollm2.params, smollm2.cfg, loaded.token_ids)
    variant = Variant(smollm2.cfg, loaded.config, 8)
    rows = {r.workload: r for r in replay_workloads(loaded.params, frozen, answered, variant)}
    tokenizer = Tokenizer(smollm2.vocabulary)
    asked = {
        name: tokenizer.chat_prompt([{"role": "user", "content": group[0].turns[0]}])
        for name, group in PROMPTS.items()
    }
    runners = Runners(
        smollm2.params,
        smollm2.cfg,
        make_draft_weights(smollm2.params, smollm2.cfg, loaded.params, loaded.token_ids),
        loaded.config,
        block_sizes=(8,),
        stop_ids=tokenizer.stop_ids,
        sizes=fit_sizes([len(ids) for ids in asked.values()], 24, 8, 512),
    )
    for name, ids in asked.items():
        decoded = runners.speculative[8](ids, 24)
        assert (rows[name].tokens, rows[name].cycles) == (
            len(decoded.tokens) - 1,
            len(decoded.cycles),
        )
    told.clear()
    answer()  # all is there
    assert told == []
    for shard in (tmp_path / "features").glob("shard*"):
        shard.unlink()
    with pytest.raises(ValueError, match="the features of 2 answers were lost"):
        answer()
