r"""Where does a training step spend its time?

    python experiments/bench_train.py
    python experiments/bench_train.py --variant "" --repeats 10

Times, interleaved on one batch of synthetic rows: the whole step with features given, its forward
pass, the vocabulary head alone (value and gradient), the optimiser, and the target's features,
which a step with `data.features="online"` pays on top. Weights do not matter for time. Writes
summary.json and rows.jsonl to `--output`.
"""

import argparse
import json
import os
import pathlib
import runpy

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dscout_jax.config.experiment import from_config_dict
from dscout_jax.data.responses import Response
from dscout_jax.evaluation.command import one_line_errors
from dscout_jax.evaluation.report import write_samples
from dscout_jax.files import require_writable
from dscout_jax.objective.slots import Schedule, Slots, slot_terms
from dscout_jax.throughput.latency import interleave, medians, timed
from dscout_jax.training.setup import Setup, prepare
from dscout_jax.weights.targets import load_target

CONFIG = pathlib.Path(__file__).parent / "configs" / "smollm2_dflash.py"


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", default="mixed", help="of configs/smollm2_dflash.py")
    parser.add_argument("--prompt_tokens", type=int, default=80, help="a row")
    parser.add_argument("--response_tokens", type=int, default=120, help="a row")
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds")
    parser.add_argument("--output", default="results/bench_train", help="folder of the results")
    return parser


def make_setup(args: argparse.Namespace) -> Setup:
    """Returns the experiment's steps over synthetic rows of one length."""
    values = runpy.run_path(str(CONFIG))["get_config"](args.variant)
    values.data.features, values.data.feature_cache = "online", None
    values.train.eval_rows = 1
    config = from_config_dict(values.to_dict())
    target = load_target(config.target)
    generator = np.random.default_rng(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(generator.integers(100, target.cfg.vocab_size, count).tolist())

    responses = [
        Response(f"row/{i}", tokens(args.prompt_tokens), tokens(args.response_tokens), True)
        for i in range(40 * config.train.batch_size)
    ]
    return prepare(config, target, responses, say=lambda line: None)


def head_inputs(setup: Setup) -> list[tuple]:
    """Returns hidden states, head, slots and schedule of each horizon, as the loss sees them."""
    head = setup.frozen.tables.head
    inputs = []
    for block_size, anchors in setup.config.objective.horizons:
        shape = (setup.config.train.batch_size * anchors, block_size - 1)
        hidden = jnp.ones((*shape, head.shape[1])) / head.shape[1]
        slots = Slots(
            labels=jnp.zeros(shape, jnp.int32),
            included=jnp.ones(shape, bool),
            revealed=jnp.zeros(shape, bool),
        )
        schedule = Schedule(jnp.float32(1.0), jnp.ones(block_size - 1))
        inputs.append((hidden, head, slots, schedule))
    return inputs


def make_timers(setup: Setup, batch: dict) -> dict:
    """Returns one timer for each part of a step."""
    held = {"state": setup.first_state()}
    objective = setup.config.objective
    parts = head_inputs(setup)

    @jax.jit
    def head(parts):
        def total(hiddens):
            sums = (
                slot_terms(objective, hidden, *part[1:])[0]
                for hidden, part in zip(hiddens, parts, strict=True)
            )
            return sum(sums)

        return jax.value_and_grad(total)([part[0] for part in parts])

    @jax.jit
    def update(state):
        return setup.optimizer.update(state.params, state.opt_state, state.params)

    def step():
        held["state"], metrics = setup.train_step(held["state"], setup.frozen, batch)
        return metrics

    return {
        "step": lambda: timed(step),
        "forward": lambda: timed(
            lambda: setup.eval_sums(held["state"].params, setup.frozen, batch)
        ),
        "head": lambda: timed(lambda: head(parts)),
        "optimizer": lambda: timed(lambda: update(held["state"])),
        "target_features": lambda: timed(
            lambda: setup.features_fn(batch["tokens"], batch["length"])
        ),
    }


def main() -> None:
    """Measures, prints and writes."""
    args = build_parser().parse_args()
    with one_line_errors("bench_train"):
        bench(args, require_writable(args.output))


def bench(args: argparse.Namespace, output: pathlib.Path) -> None:
    """Measures, writes and prints."""
    load_before = os.getloadavg()[0]
    setup = make_setup(args)
    batch = setup.trim(next(setup.training_iterator()))
    batch["features"] = setup.features_fn(batch["tokens"], batch["length"])
    rounds = interleave(make_timers(setup, batch), args.repeats)
    samples = list(tqdm(rounds, total=args.repeats, desc="rounds"))
    middle = medians(samples)
    num_tokens = int(batch["length"].sum())
    slots = sum((size - 1) * anchors for size, anchors in setup.config.objective.horizons)
    summary = {
        "median_s": middle,
        "tokens_per_s_cached": num_tokens / middle["step"],
        "tokens_per_s_online": num_tokens / (middle["step"] + middle["target_features"]),
        "supervised_slots_per_s": slots * setup.config.train.batch_size / middle["step"],
        "share_of_step": {
            name: middle[name] / middle["step"] for name in ("forward", "head", "optimizer")
        },
        "settings": vars(args),
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    write_samples(output, samples, summary)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
