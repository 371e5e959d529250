r"""Is plain decoding strong, and does a cycle cost no more than its two forwards?

    python experiments/bench_decode.py
    python experiments/bench_decode.py --torch_python ~/torch/bin/python --dflash_dir ~/dflash

Measures on this machine, batch 1, float32, about 300 tokens of context: plain decoding and its
share of the memory bandwidth limit; draft, verify and whole cycles by block size. With
`--torch_python` (an environment with torch, transformers, gguf and accelerate) the same run also
times Hugging Face transformers and, with `--dflash_dir` (a checkout of z-lab/dflash), z-lab's
cycle, between two halves of our own measurements. Latency does not depend on trained values, so
the drafter is random.

Writes summary.json, rows.jsonl and, with torch, torch.json to `--output`.
"""

import argparse
import json
import os
import pathlib
import subprocess
import time

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dscout_jax.config.models import TargetConfig
from dscout_jax.decoding.speculative import make_draft_weights
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.command import one_line_errors
from dscout_jax.evaluation.report import write_samples
from dscout_jax.files import require_writable
from dscout_jax.models.drafter import init_drafter
from dscout_jax.throughput.latency import (
    Setting,
    cycle_timer,
    interleave,
    medians,
    phase_timers,
    plain_timer,
)
from dscout_jax.training.initialization import drafter_config
from dscout_jax.weights.targets import load_target, locate_target

TORCH_SCRIPT = pathlib.Path(__file__).with_name("bench_torch.py")
TAP_IDS = (1, 8, 14, 21, 27)
NUM_LAYERS = 3


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--block_sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--draft_vocab_size", type=int, default=16384, help="rows of the draft head"
    )
    parser.add_argument("--context", type=int, default=300, help="tokens of context")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--steps", type=int, default=16, help="steps or cycles a round")
    parser.add_argument("--torch_python", help="python of an environment with torch; none = skip")
    parser.add_argument("--dflash_dir", help="checkout of z-lab/dflash; none = skip")
    parser.add_argument("--output", default="results/bench_decode", help="folder of the results")
    return parser


def bandwidth_timer(num_bytes: int = 1 << 29):
    """Returns a function that times a matrix-vector product over `num_bytes` of float32.

    It reads every byte once, like decoding; its best time is the bandwidth limit.
    """
    width = 4096
    matrix = jnp.ones((num_bytes // 4 // width, width))
    vector = jnp.ones((width,))
    product = jax.jit(jnp.dot)

    def once() -> float:
        start = time.perf_counter()
        product(matrix, vector).block_until_ready()
        return time.perf_counter() - start

    return once, matrix.nbytes


def bytes_per_token(params: dict, config: TargetConfig, context: int) -> int:
    """Returns what one plain step must read: all weights once, and keys and values."""
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    cache = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * context
    return weights + 4 * cache


def make_timers(target, block_sizes, draft_vocab_size, setting):
    """Returns all programs of this project by name, and the bytes that `bandwidth` reads."""
    drafter = drafter_config(
        target.cfg,
        num_hidden_layers=NUM_LAYERS,
        target_layer_ids=TAP_IDS,
        mask_token_id=0,
        block_size=max(block_sizes),
    )
    token_ids = jnp.arange(draft_vocab_size, dtype=jnp.int32)
    weights = make_draft_weights(
        target.params, target.cfg, init_drafter(jax.random.key(0), drafter), token_ids
    )
    full = make_draft_weights(target.params, target.cfg, weights.drafter)
    bandwidth, num_bytes = bandwidth_timer()
    timers = {
        "bandwidth": bandwidth,
        "plain": plain_timer(target.params, target.cfg, setting, max(block_sizes)),
    }
    for size in block_sizes:
        variant = Variant(target.cfg, drafter, size)
        timers[f"cycle_{size}"] = cycle_timer(target.params, weights, variant, setting)
        for name, timer in phase_timers(target.params, weights, variant, setting).items():
            timers[f"{name}_{size}"] = timer
        timers[f"cycle_full_vocabulary_{size}"] = cycle_timer(target.params, full, variant, setting)
    return timers, num_bytes


def run_torch(args, gguf: pathlib.Path, output: pathlib.Path) -> dict:
    """Runs bench_torch.py in its own environment and returns what it wrote."""
    file = output / "torch.json"
    command = [args.torch_python, str(TORCH_SCRIPT), "--gguf", str(gguf), "--json", str(file)]
    command += ["--context", str(args.context), "--block_sizes", *map(str, args.block_sizes)]
    if args.dflash_dir is not None:
        command += ["--dflash_dir", args.dflash_dir]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    return json.loads(file.read_text(encoding="utf-8"))


def summarize(args, samples, target, num_bytes, torch_results) -> dict:
    """Returns the figures of summary.json; ratios are of medians within this run."""
    middle = medians(samples)
    best_bandwidth = num_bytes / min(sample["bandwidth"] for sample in samples)
    limit_s = bytes_per_token(target.params, target.cfg, args.context) / best_bandwidth
    over_parts = {
        str(size): float(
            np.median(
                [s[f"cycle_{size}"] / (s[f"draft_{size}"] + s[f"verify_{size}"]) for s in samples]
            )
        )
        for size in args.block_sizes
    }
    summary = {
        "plain_ms": 1e3 * middle["plain"],
        "plain_tokens_per_s": 1 / middle["plain"],
        "bandwidth_gb_per_s": best_bandwidth / 1e9,
        "plain_share_of_bandwidth": limit_s / middle["plain"],
        "cycle_over_parts": max(over_parts.values()),
        "cycle_over_parts_by_block_size": over_parts,
        "cycle_over_plain": {
            str(size): middle[f"cycle_{size}"] / middle["plain"] for size in args.block_sizes
        },
        "pruned_over_full_vocabulary": {
            str(size): middle[f"cycle_{size}"] / middle[f"cycle_full_vocabulary_{size}"]
            for size in args.block_sizes
        },
        "plain_over_hf": None,
        "cycle_over_zlab": None,
        "median_ms": {name: 1e3 * value for name, value in middle.items() if name != "bandwidth"},
    }
    if torch_results is not None:
        theirs = torch_results["summary"]
        # The faster of transformers' two ways is the baseline.
        best = max(theirs["hf_generate_tokens_per_s"], theirs["hf_loop_tokens_per_s"])
        summary["hf_tokens_per_s"] = best
        summary["plain_over_hf"] = summary["plain_tokens_per_s"] / best
        # z-lab's loop drafts from the whole vocabulary, so ours does here, too.
        over_zlab = {
            str(size): 1e3
            * middle[f"cycle_full_vocabulary_{size}"]
            / theirs[f"zlab_cycle_block{size}_ms"]
            for size in args.block_sizes
            if f"zlab_cycle_block{size}_ms" in theirs
        }
        if over_zlab:
            summary["cycle_over_zlab"] = max(over_zlab.values())
            summary["cycle_over_zlab_by_block_size"] = over_zlab
    return summary


def main() -> None:
    """Measures and writes."""
    args = build_parser().parse_args()
    with one_line_errors("bench_decode"):
        bench(args, require_writable(args.output))


def bench(args: argparse.Namespace, output: pathlib.Path) -> None:
    """Measures, writes and prints."""
    setting = Setting(context=args.context, steps=args.steps)
    target = load_target("smollm2-135m")
    gguf = locate_target("smollm2-135m")
    load_before = os.getloadavg()[0]
    timers, num_bytes = make_timers(target, args.block_sizes, args.draft_vocab_size, setting)
    half = max(1, args.repeats // 2)
    samples, torch_results = [], None
    with tqdm(total=2 * half, desc="rounds") as bar:
        for part in range(2):
            for sample in interleave(timers, half):
                samples.append(sample)
                bar.update()
            if part == 0 and args.torch_python is not None:
                torch_results = run_torch(args, gguf, output)
    summary = summarize(args, samples, target, num_bytes, torch_results)
    summary |= {
        "settings": vars(args) | {"torch_python": None, "dflash_dir": None, "output": None},
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
    }
    write_samples(output, samples, summary)
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
