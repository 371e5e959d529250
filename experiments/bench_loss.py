r"""Does the loss in chunks save memory, what does it cost in time, and does it fit a TPU?

    python experiments/bench_loss.py
    python experiments/bench_loss.py --topology v5e  # for one TPU v5e chip, without one

The first form compiles the training step (loss, gradient, AdamW) for the shapes of the default
target, all blocks at once and in chunks, reads the peak memory from the compiled programs and times
both, interleaved. The second compiles the step of a Qwen3-4B-sized drafter (one row of 3,072
tokens, 512 blocks of 16 slots, vocabulary 151,936, cached features) for a chip that is not there
and compares the peak with the chip's memory; it needs libtpu (`pip install "jax[tpu]"`). Writes
summary.json and rows.jsonl to `--output`.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from tqdm import tqdm

from dscout_jax.config.experiment import ObjectiveConfig, OptimizerConfig
from dscout_jax.config.models import DrafterConfig
from dscout_jax.evaluation.command import one_line_errors
from dscout_jax.evaluation.report import write_samples
from dscout_jax.files import require_writable
from dscout_jax.models.drafter import init_drafter
from dscout_jax.objective.loss import Frozen, loss_sums
from dscout_jax.throughput.latency import interleave, medians, timed
from dscout_jax.training.parallel import make_train_step
from dscout_jax.training.state import init_state, make_optimizer, make_schedule

CHIPS = {"v5e": ("v5e:1x1", 15.75)}  # topology, GiB of memory that a program may use
OPTIMIZER, NUM_STEPS = OptimizerConfig(), 100


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A step's sizes: B rows of S tokens with A blocks of the drafter's block size each."""

    drafter: DrafterConfig
    rows: int
    tokens: int
    anchors: int
    table_dtype: Any = jnp.float32


SMOLLM2 = DrafterConfig(
    hidden_size=576, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, rope_theta=100_000.0, rms_norm_eps=1e-5, vocab_size=49_152,
    num_target_layers=30, target_layer_ids=(1, 8, 14, 21, 27), mask_token_id=16, block_size=16,
)  # fmt: skip
QWEN3_4B = DrafterConfig(
    hidden_size=2560, intermediate_size=9728, num_hidden_layers=5, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, vocab_size=151_936,
    num_target_layers=36, target_layer_ids=(1, 9, 17, 25, 33), mask_token_id=151_669, block_size=16,
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=8, help="B, rows of a batch")
    parser.add_argument("--tokens", type=int, default=192, help="S, tokens of a row")
    parser.add_argument("--anchors", type=int, default=64, help="blocks of 16 slots in a row")
    parser.add_argument("--chunk_anchors", type=int, default=8, help="blocks of a row in a chunk")
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds")
    parser.add_argument("--topology", choices=sorted(CHIPS), help="compile for this chip instead")
    parser.add_argument("--output", default="results/bench_loss", help="folder of the results")
    return parser


def make_step(shapes: Shapes, chunk_anchors: int, *, naive: bool):
    """Returns the compiled-on-demand training step `(state, frozen, batch)`."""
    objective = ObjectiveConfig(
        horizons=((shapes.drafter.block_size, shapes.anchors),), chunk_anchors=chunk_anchors
    )

    def sums(state, params, frozen, batch, keys):
        return loss_sums(
            params, frozen, batch["features"], batch, keys,
            config=shapes.drafter, objective=objective, naive=naive,
        )  # fmt: skip

    optimizer = make_optimizer(OPTIMIZER, NUM_STEPS)
    return make_train_step(sums, optimizer, make_schedule(OPTIMIZER, NUM_STEPS))


def make_arguments(shapes: Shapes) -> tuple:
    """Returns a state, the target's tables and a batch of made-up rows."""
    config = shapes.drafter
    keys = jax.random.split(jax.random.key(0), 5)
    size = (shapes.rows, shapes.tokens)
    width = config.hidden_size
    table = jax.random.normal(keys[0], (config.vocab_size, width)) * 0.05
    table = table.astype(shapes.table_dtype)
    batch = {
        "tokens": jax.random.randint(keys[1], size, 0, config.vocab_size),
        "length": jnp.full(shapes.rows, shapes.tokens),
        "response_start": jnp.full(shapes.rows, shapes.tokens // 8),
        "features": jax.random.normal(
            keys[2], (*size, len(config.target_layer_ids) * width), jnp.bfloat16
        ),
    }
    optimizer = make_optimizer(OPTIMIZER, NUM_STEPS)
    state = init_state(init_drafter(keys[3], config), optimizer, keys[4], (config.block_size,))
    return state, Frozen(table, table), batch


def mebibytes(compiled) -> dict[str, float]:
    """Returns what a program holds at its peak, without and with its arguments and results."""
    analysis = compiled.memory_analysis()
    held = (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
    )
    return {
        "temporaries": analysis.temp_size_in_bytes / 2**20,
        "peak": (analysis.temp_size_in_bytes + held) / 2**20,
    }


def bench(args: argparse.Namespace, output: pathlib.Path) -> None:
    """Compiles and times both ways; writes and prints."""
    load_before = os.getloadavg()[0]
    shapes = Shapes(SMOLLM2, args.rows, args.tokens, args.anchors)
    timers, memory = {}, {}
    for way in ("chunked", "naive"):
        state, *rest = jax.jit(make_arguments, static_argnums=0)(shapes)
        step = make_step(shapes, args.chunk_anchors, naive=way == "naive")
        compiled = step.lower(state, *rest).compile()
        memory[way] = mebibytes(compiled)
        held = {"state": state}

        def run(compiled=compiled, held=held, rest=rest):
            held["state"], metrics = compiled(held["state"], *rest)
            return metrics

        timers[way] = functools.partial(timed, run)
    samples = list(tqdm(interleave(timers, args.repeats), total=args.repeats, desc="rounds"))
    middle = medians(samples)
    ratios = {name: memory["chunked"][name] / memory["naive"][name] for name in memory["naive"]}
    summary = {
        "median_s": middle,
        "mebibytes": memory,
        "chunked_over_naive": {"time": middle["chunked"] / middle["naive"]} | ratios,
        "settings": vars(args),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    write_samples(output, samples, summary)
    print(json.dumps(summary, indent=2))


def compile_for_chip(chip: str, chunk_anchors: int) -> dict[str, Any]:
    """Returns the peak memory of a Qwen3-4B-sized drafter's step on one chip.

    A program that does not fit is reported in the compiler's own words.
    """
    name, limit = CHIPS[chip]
    place = topologies.get_topology_desc(
        platform="tpu", topology_name=name, chips_per_host_bounds=[1, 1, 1]
    )
    device = jax.sharding.SingleDeviceSharding(place.devices[0])
    shapes = Shapes(QWEN3_4B, 1, 3072, 512, table_dtype=jnp.bfloat16)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        jax.eval_shape(functools.partial(make_arguments, shapes)),
    )
    found: dict[str, Any] = {"chip": chip, "limit_gib": limit}
    for way in ("chunked", "naive"):
        step = make_step(shapes, chunk_anchors, naive=way == "naive")
        try:
            analysis = step.lower(*arguments).compile().memory_analysis()
            found[f"{way}_peak_gib"] = analysis.peak_memory_in_bytes / 2**30
        except jax.errors.JaxRuntimeError as error:
            found[f"{way}_refused"] = " ".join(str(error).split())[:160]
    return found


def main() -> None:
    """Measures, prints and writes."""
    args = build_parser().parse_args()
    with one_line_errors("bench_loss"):
        output = require_writable(args.output)
        if args.topology is None:
            bench(args, output)
        else:
            found = compile_for_chip(args.topology, args.chunk_anchors)
            write_samples(output, [], found | {"settings": vars(args)})
            print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
