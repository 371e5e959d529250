r"""DScout and the published objectives it is compared with, on SmolLM2-135M-Instruct.

    C=experiments/configs/smollm2_dscout.py
    python experiments/train.py --config=$C --workdir=runs/dscout
    python experiments/train.py --config=$C:d_pace --workdir=runs/d_pace

Without a variant: blocks of 4, 8 and 16 slots side by side, a quarter of them with a revealed
prefix, weighted by the smoothed probability that verification reaches a slot. Each name of
`dscout_jax/objective/methods.py` is a variant: the same data, schedule and number of slots in a
row, with that method's objective on blocks of 16. `:smoke` is DScout's objective in a minute.
"""

import pathlib
import runpy

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from dscout_jax.objective.methods import METHODS

BASE = pathlib.Path(__file__).parent / "smollm2_dflash.py"
# 176 slots in a row either way, anchors included.
MIXED, SINGLE = ((4, 8), (8, 8), (16, 5)), ((16, 11),)


def get_config(variant: str = "dscout") -> ConfigDict:
    """Returns the experiment of a method; sections and fields as in `config.ExperimentConfig`."""
    if variant not in (*METHODS, "smoke"):
        raise ValueError(
            f"config variant {variant!r} is unknown; allowed: {', '.join(METHODS)} or smoke"
        )
    base = runpy.run_path(str(BASE))["get_config"]
    if variant == "smoke":
        config = base("smoke")
        config.objective.horizons = ((4, 2), (8, 2))
        config.objective.gamma = placeholder(float)  # each horizon its own
        config.objective.update(METHODS["dscout"])
        return config
    config = base("mixed")
    config.objective.horizons = MIXED if variant == "dscout" else SINGLE
    config.objective.update(METHODS[variant])
    config.drafter.draft_vocab_size = 8192
    return config
