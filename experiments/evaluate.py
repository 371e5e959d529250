r"""MAT of a drafter on held-out responses by replay: no decoding, exact at temperature 0.

    python experiments/evaluate.py --store runs/data/store
    python experiments/evaluate.py --store runs/data/store --draft_vocab_sizes 8192 16384 49152

Replays the validation split of a store (the rows that training never saw), each response cut where
its verbatim loop starts, for every block size and draft vocabulary that was asked for. A pruned
vocabulary holds the most frequent response tokens of the training split; 0 stands for the
vocabulary that the drafter was exported with. Writes summary.json and rows.csv to `--output`.
"""

import argparse
import pathlib
from collections import defaultdict
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from dscout_jax.data.pipeline import evaluation_batches, make_examples, split_examples
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.command import one_line_errors
from dscout_jax.evaluation.report import describe_environment
from dscout_jax.evaluation.tables import csv_table
from dscout_jax.files import require_writable, write_json, write_text
from dscout_jax.training.inputs import load_responses, most_frequent_tokens, sample_rows, trim_batch
from dscout_jax.training.parallel import make_features_fn
from dscout_jax.training.validation import freeze, replay
from dscout_jax.weights.dflash import WEIGHTS_FILE, load_drafter
from dscout_jax.weights.download import sha256_of
from dscout_jax.weights.targets import TARGETS, load_target

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
LENGTH_MULTIPLE = 64


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--drafter", type=pathlib.Path, default=REPOSITORY / "drafters" / "smollm2-135m-dscout"
    )
    parser.add_argument("--target", default="smollm2-135m", choices=sorted(TARGETS))
    parser.add_argument("--store", required=True, type=pathlib.Path, help="store of responses")
    parser.add_argument("--validation_fraction", type=float, default=0.04, help="as in training")
    parser.add_argument("--seq_len", type=int, default=448, help="longest row in tokens")
    parser.add_argument("--rows", type=int, default=200, help="held-out rows, at most")
    parser.add_argument("--block_sizes", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--draft_vocab_sizes", type=int, nargs="+", default=[0])
    parser.add_argument("--output", type=pathlib.Path, default="runs/evaluate", help="results")
    return parser


def vocabularies(sizes, loaded, training, vocab_size) -> Iterator[tuple[int, np.ndarray | None]]:
    """Yields (size, token ids) of each draft vocabulary."""
    for size in sizes:
        if size == 0:
            ids = loaded.token_ids
            yield (vocab_size if ids is None else len(ids)), ids
        elif size >= vocab_size:
            yield vocab_size, None
        else:
            yield size, most_frequent_tokens(training, size, vocab_size)


def evaluate(args: argparse.Namespace) -> list[dict]:
    """Returns one row per block size, draft vocabulary and source of prompts."""
    target = load_target(args.target)
    loaded = load_drafter(args.drafter, target.cfg)
    examples = make_examples(load_responses(str(args.store)), args.seq_len)
    training, held_out = split_examples(examples, args.validation_fraction)
    held_out = sample_rows(held_out, args.rows, seed=0)
    variants = [Variant(target.cfg, loaded.config, size) for size in sorted(args.block_sizes)]
    features_fn = make_features_fn(
        target.params, target.cfg, loaded.config.target_layer_ids, jnp.float32
    )
    frozen = {
        size: freeze(target.params, target.cfg, ids)
        for size, ids in vocabularies(
            args.draft_vocab_sizes, loaded, training, target.cfg.vocab_size
        )
    }
    taus = defaultdict(list)
    batches = list(evaluation_batches(held_out, 8))
    for batch in tqdm(batches, desc="replay", unit="batch", disable=None):
        sources = [examples[row].id.split("/")[0] for row in batch["row"] if row >= 0]
        batch = trim_batch(batch, LENGTH_MULTIPLE, at_least=LENGTH_MULTIPLE)
        batch["features"] = features_fn(batch["tokens"], batch["length"])
        for vocabulary, tables in frozen.items():
            for variant in variants:
                walked = replay(loaded.params, tables, batch, variant)
                for source, row in zip(sources, walked, strict=True):
                    for name in (source, "all"):
                        taus[variant.block_size, vocabulary, name].append(row)
    return [
        {
            "block_size": size,
            "draft_vocab_size": vocabulary,
            "source": source,
            "rows": len(rows),
            "mat_pooled": float(np.mean(np.concatenate(rows))),
            "mat_macro": float(np.mean([np.mean(row) for row in rows])),
        }
        for (size, vocabulary, source), rows in sorted(taus.items())
    ]


def main() -> None:
    """Evaluates, prints and writes."""
    args = build_parser().parse_args()
    with one_line_errors("evaluate"):
        require_writable(args.output)
        rows = evaluate(args)
    write_text(args.output / "rows.csv", csv_table(rows))
    totals = [row for row in rows if row["source"] == "all"]
    write_json(
        args.output / "summary.json",
        {
            "mat": totals,
            "drafter_sha256": sha256_of(args.drafter / WEIGHTS_FILE),
            "settings": {
                key: value.name if isinstance(value, pathlib.Path) else value
                for key, value in vars(args).items()
            },
            "environment": describe_environment(),
        },
    )
    for row in totals:
        print(
            f"block size {row['block_size']:2d}, draft vocabulary {row['draft_vocab_size']:5d}: "
            f"MAT {row['mat_pooled']:.3f} pooled, {row['mat_macro']:.3f} macro, {row['rows']} rows"
        )


if __name__ == "__main__":
    main()
