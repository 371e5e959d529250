r"""DFlash drafter for SmolLM2-135M-Instruct: one horizon, exponential decay, cross entropy.

Reproduces the recipe of DFlash (all slots of one horizon, weight exp(-(k-1)/gamma), hard labels) on
the target's own greedy answers. Build the store first (`experiments/generate_responses.py --store
runs/data/store`), then

    python experiments/train.py --config=experiments/configs/smollm2_dflash.py --workdir=runs/dflash

Variants: `:mixed` trains blocks of 4, 8 and 16 slots side by side, so that one drafter serves
every block size; the drafter in `drafters/` was made with it. `:smoke` trains a few steps on a few
rows, about a minute on a laptop CPU; its drafter is of no use. Any field can be set on the command
line: `--config.train.num_steps=500`.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

VARIANTS = ("", "mixed", "smoke")


def get_config(variant: str = "") -> ConfigDict:
    """Returns the experiment; sections and fields as in `dscout_jax.config.ExperimentConfig`."""
    if variant not in VARIANTS:
        raise ValueError(f"config variant {variant!r} is unknown; allowed: mixed, smoke, or none")
    config = ConfigDict()
    config.target = "smollm2-135m"

    config.drafter = ConfigDict()
    config.drafter.num_hidden_layers = 3
    config.drafter.target_layer_ids = (1, 8, 14, 21, 27)  # of 30 layers, 0-based
    config.drafter.block_size = 8  # slots, the anchor included
    # <empty_output>: never trained in this target, its embedding lies near the table's mean.
    config.drafter.mask_token_id = 16
    config.drafter.init = "target_layers"
    config.drafter.draft_vocab_size = 8192  # most frequent response tokens

    config.data = ConfigDict()
    config.data.store = "runs/data/store"
    config.data.seq_len = 448  # tokens, prompt and response
    config.data.validation_fraction = 0.04  # of the rows
    config.data.seed = 0
    config.data.features = "cached"  # on a CPU the target costs more than the drafter's step
    config.data.feature_cache = "runs/data/features"
    config.data.feature_dtype = "bfloat16"
    config.data.target_dtype = "float32"

    config.objective = ConfigDict()
    config.objective.horizons = ((8, 32),)  # (slots, anchors a row)
    config.objective.depths = ()  # (layers, share): elastic depth
    config.objective.exits = "sampled"
    config.objective.taps = ()  # (indices of taps, share): elastic conditioning
    config.objective.reveal = "prefix"
    config.objective.reveal_rate = 0.0  # of the blocks
    config.objective.reveal_decay = 1.0
    config.objective.weighting = "exp_decay"
    config.objective.acceptance = "target_prob"
    config.objective.smoothing = 0.5
    config.objective.floor = 0.0
    config.objective.weight_warmup = 0.0  # of the steps
    config.objective.horizon_correction = False
    config.objective.horizon_shares = ()
    config.objective.gamma = 4.0  # slots
    config.objective.prediction = "ce"
    config.objective.normalizer = "weights"
    config.objective.chunk_anchors = 8  # blocks of a row whose logits exist at once

    config.optimizer = ConfigDict()
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3  # peak
    config.optimizer.beta1 = 0.9
    config.optimizer.beta2 = 0.95
    config.optimizer.weight_decay = 0.01  # on matrices
    config.optimizer.clip_norm = 1.0  # global norm of the gradient
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_fraction = 0.04  # of the steps
    config.optimizer.decay_fraction = 0.2  # of the steps, with schedule "wsd"
    config.optimizer.final_fraction = 0.1  # of the peak

    config.train = ConfigDict()
    config.train.num_steps = 12_000
    config.train.batch_size = 8  # rows
    config.train.seed = 0
    config.train.log_every = 20  # steps
    config.train.eval_every = 500  # steps
    config.train.eval_rows = 64
    config.train.checkpoint_every = 250  # steps
    config.train.keep_checkpoints = 2
    config.train.mode = "jit"
    config.train.mesh = (-1, 1, 1)  # devices for data, fsdp, tensor
    config.train.accumulate = 1
    config.train.remat = False
    config.train.compute_dtype = "float32"
    config.train.ema_decay = placeholder(float)
    config.train.max_skipped = 5  # in a row

    if variant == "mixed":
        config.drafter.block_size = 16
        config.objective.horizons = ((4, 16), (8, 20), (16, 4))
        config.drafter.draft_vocab_size = 16_384
        config.objective.gamma = placeholder(float)  # each horizon its own
        config.optimizer.schedule = "wsd"
        config.train.num_steps = 20_000

    if variant == "smoke":
        config.data.seq_len = 192
        config.data.features = "online"
        config.objective.horizons = ((8, 4),)
        config.train.num_steps = 12
        config.train.batch_size = 2
        config.train.log_every = 3
        config.train.eval_every = 6
        config.train.eval_rows = 4
        config.train.checkpoint_every = 6
    return config
