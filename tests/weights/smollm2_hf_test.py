"""All 49,152 logits of SmolLM2 against transformers itself; runs only where torch is installed."""

import jax.numpy as jnp
import numpy as np
import pytest

from dscout_jax.models.target import apply_target, compute_logits
from dscout_jax.weights.targets import locate_target

torch = pytest.importorskip("torch", reason="torch is not installed (optional check)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def test_every_logit_equals_transformers_over_256_positions(smollm2):
    tokens = np.random.default_rng(0).integers(3, smollm2.cfg.vocab_size, 256)
    hidden = apply_target(smollm2.params, smollm2.cfg, jnp.asarray(tokens)[None]).hidden
    ours = np.asarray(compute_logits(smollm2.params, smollm2.cfg, hidden)[0])

    path = locate_target("smollm2-135m")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor(tokens[None]), use_cache=False).logits[0].numpy()
    assert ours.shape == theirs.shape == (256, smollm2.cfg.vocab_size)
    assert np.abs(ours - theirs).max() < 1e-3
