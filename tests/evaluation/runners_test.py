import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.decoding.speculative import make_draft_weights
from dscout_jax.evaluation.benchmarks import first_difference
from dscout_jax.evaluation.runners import Runners, fit_sizes
from dscout_jax.models.drafter import init_drafter
from dscout_jax.models.target import apply_target, compute_logits, init_target

TARGET = TargetConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    qk_norm=False,
    max_position_embeddings=512,
)
DRAFTER = DrafterConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    vocab_size=61,
    num_target_layers=3,
    target_layer_ids=(0, 1),
    mask_token_id=60,
    block_size=4,
)
PROMPT = [5, 9, 3, 44, 17]
NEW_TOKENS = 24
TARGET_KEY = jax.random.key(2)


@pytest.fixture(scope="module")
def runners():
    params = init_target(TARGET_KEY, TARGET)
    # This target repeats token 17 for a while; a drafter that knows no other word is right there.
    weights = make_draft_weights(
        params, TARGET, init_drafter(jax.random.key(1), DRAFTER), jnp.asarray([17])
    )
    made = Runners(
        params,
        TARGET,
        weights,
        DRAFTER,
        block_sizes=(2, 4),
        stop_ids=(55,),
        sizes=fit_sizes([len(PROMPT), 100, 150], NEW_TOKENS, 4, 512),
    )
    list(made.compile())
    return made


@pytest.mark.parametrize("block_size", [2, 4])
def test_both_ways_give_the_same_answer_and_the_cycles_add_up(runners, block_size):
    plain = runners.plain(PROMPT, NEW_TOKENS)
    speculative = runners.speculative[block_size](PROMPT, NEW_TOKENS)
    assert first_difference(plain.tokens, speculative.tokens) is None
    assert sum(speculative.cycles) == len(speculative.tokens) - 1
    assert (min(speculative.cycles), max(speculative.cycles)) == (1, block_size)
    assert plain.prefill_s > 0 and speculative.decode_s > 0


def test_the_stream_is_the_answer_cut_into_cycles(runners):
    whole = runners.decode_speculative(PROMPT, NEW_TOKENS, 4)
    pieces = []
    runners.stream(PROMPT, NEW_TOKENS, 4, pieces.append, cycles_at_once=2)
    assert tuple(itertools.chain(*pieces)) == whole.tokens
    assert tuple(map(len, pieces)) == (1, *whole.cycles)


def test_the_margin_is_what_the_worse_candidate_lacks(runners):
    params = init_target(TARGET_KEY, TARGET)
    out = apply_target(params, TARGET, np.asarray([PROMPT], np.int32))
    logits = compute_logits(params, TARGET, out.hidden)[0, -1].tolist()
    expected = max(logits) - min(logits[3], logits[5])
    assert runners.margin(PROMPT, [5, 3]) == pytest.approx(expected, abs=1e-5)


def test_a_block_size_that_was_not_compiled_is_refused(runners):
    with pytest.raises(ValueError, match="block_size=5 is not compiled; allowed"):
        runners.decode_speculative(PROMPT, NEW_TOKENS, 5)


def test_after_compiling_nothing_compiles(runners):
    from dscout_jax.decoding.autoregressive import decode_steps, prefill
    from dscout_jax.decoding.speculative import decode_cycles, prefill_speculative

    def compiled():
        programs = (prefill, decode_steps, prefill_speculative, decode_cycles)
        return [program._cache_size() for program in programs]

    before = compiled()
    runners.plain(PROMPT[:3], 5)
    runners.speculative[2](PROMPT[:3], 6)
    runners.speculative[4](PROMPT, 7)
    for length in (64, 65, 128, 129, 192):
        runners.plain([1] * length, 2)
        runners.speculative[4]([1] * length, 2)
    runners.stream(PROMPT, 8, 4, lambda tokens: None)
    assert compiled() == before


def test_a_prompt_that_is_empty_or_too_long_is_refused(runners):
    with pytest.raises(ValueError, match="has 0 tokens; allowed are 1 to 192"):
        runners.plain([], 4)
    with pytest.raises(ValueError, match="has 193 tokens"):
        runners.speculative[4]([1] * 193, 4)
    with pytest.raises(ValueError, match=r"max_new_tokens=25 must lie in \[1, 24\]"):
        runners.plain(PROMPT, NEW_TOKENS + 1)


def test_sizes_hold_prompt_answer_and_block():
    sizes = fit_sizes([10, 65, 130], 100, 16, 512)
    assert sizes.widths == (64, 128, 192)
    assert sizes.capacity == 256
    assert sizes.width_of(64) == 64
    with pytest.raises(ValueError, match="needs 513 positions, the cache holds 512"):
        fit_sizes([397], 100, 16, 512)
