"""Published training objectives as points of inclusion x weighting x prediction.

Each entry gives the fields of `ObjectiveConfig` in which a method departs from its defaults;
`horizons`, the block sizes, are the experiment's. Where a paper adds something outside of
the product (a head, a second drafter), only its loss is here.

Source: the table of METHOD section 2.
"""

from typing import Any

METHODS: dict[str, dict[str, Any]] = {
    "dflash": {"weighting": "exp_decay", "prediction": "ce"},
    "d_pace": {"weighting": "marginal", "smoothing": 0.5, "prediction": "ce"},
    # CAT weights; their KL is the forward one, equal to soft_ce up to a constant.
    "pard2": {"weighting": "reach", "smoothing": 0.0, "prediction": "ce + soft_ce"},
    "spec_auf": {"weighting": "until_mismatch", "prediction": "ce"},
    "vat": {"weighting": "anchored_decay", "prediction": "soft_ce"},
    "d2sd": {"reveal": "prefix", "reveal_rate": 1.0, "weighting": "exp_decay", "prediction": "ce"},
    # The L1 distance is twice the total variation.
    "dspark": {"weighting": "exp_decay", "prediction": "0.1*ce + 1.8*tv"},
    # With mixed horizons: several pairs in `horizons`.
    "dscout": {
        "reveal": "prefix",
        "reveal_rate": 0.25,
        "weighting": "reach",
        "acceptance": "target_prob",
        "smoothing": 0.5,
        "floor": 0.05,
        "weight_warmup": 0.2,
        "prediction": "ce",
    },
}
