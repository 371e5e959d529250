"""dscout_jax: training and exact inference for speculative decoding with block-diffusion drafters.

Rooms, top to bottom; a module imports only from rooms above its own:

    config                  frozen dataclasses, validated once
    models/                 layers, KV cache, target, drafter
    objective/  decoding/   factorization one (the loss) and exact speculative decoding
    weights/    data/       reading and writing models; prompts, responses, pipelines
    training/               parallel steps, state, checkpoints, the loop
    throughput/ evaluation/ factorization two (the search); benchmarks, statistics, tables, plots

Dimension letters, the same in every docstring and shape comment:

    B   batch rows                       T   query positions of this call
    S   key positions (cache length)     G   block size: slots of a block, slot 0 known
    K   drafted slots, G - 1             A   anchors (blocks) per training row
    V   vocabulary                       D   model width
    L   target layers                    C   tapped target layers
    N   query heads                      H   head dimension
    K_h key/value heads                  F   feed-forward width
    d   drafter layers in use

Conventions: `*_mask` is boolean with True = attend or keep; `*_weight` is float; `*_len` is [B];
`num_*` counts; `*_ids` are vocabulary or layer indices; `key` is a PRNG key; "off" is None.
"""

__version__ = "0.1.0"
