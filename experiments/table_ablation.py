r"""Which part of the objective brings what? Trains every arm alike and compares them.

    python experiments/table_ablation.py --steps 1500
    python experiments/table_ablation.py --arms dflash,d_pace,dscout --seeds 0,1,2 --steps 8000 \
        --workdir runs/full --output results/ablation_full

Every arm sees the same rows in the same order with the same schedule, first weights and number of
slots in a row; only the objective differs. Stopped at any time, the same command goes on; an arm
whose run is recorded in `--output`/runs is not trained again, on any machine. The target answers
the benchmark prompts once; MAT of every drafter follows by replay, speed from the latency of a
plain step and of a cycle, timed interleaved with random weights (no trained value changes it).
Benchmarks only report: choose by the held-out rows of the training data, which are replayed too.
Writes runs/, rows.csv, table.md, summary.json and ablation.png to `--output`.
"""

import argparse
import dataclasses
import json
import pathlib
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from dscout_jax.config.checks import to_dict
from dscout_jax.config.experiment import ExperimentConfig, from_config_dict
from dscout_jax.config.models import DrafterConfig
from dscout_jax.data.features import FeatureCache, feature_settings
from dscout_jax.data.pipeline import make_examples, split_examples
from dscout_jax.data.prompts import Prompt, load_benchmark
from dscout_jax.data.responses import Response
from dscout_jax.data.store import fingerprint_responses
from dscout_jax.decoding.speculative import DraftWeights
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.ablation import HELD_OUT, Arms, Latency, compare
from dscout_jax.evaluation.command import one_line_errors
from dscout_jax.evaluation.plots import ablation_arms
from dscout_jax.evaluation.recorded import Rows, Run, read_run, write_run
from dscout_jax.evaluation.replayed import Answered, answer_workloads, replay_workloads
from dscout_jax.evaluation.report import describe_environment
from dscout_jax.evaluation.tables import csv_table, markdown_table
from dscout_jax.files import require_writable, write_json, write_text
from dscout_jax.models.drafter import init_drafter
from dscout_jax.objective.methods import METHODS
from dscout_jax.throughput.latency import Setting, cycle_timer, interleave, medians, plain_timer
from dscout_jax.training.initialization import drafter_of
from dscout_jax.training.inputs import load_responses, sample_rows
from dscout_jax.training.interrupt import StopRequest
from dscout_jax.training.loop import FREE_FIELDS, TrainingError, train
from dscout_jax.training.metrics import read_jsonl
from dscout_jax.training.validation import freeze
from dscout_jax.weights.dflash import WEIGHTS_FILE, load_drafter
from dscout_jax.weights.download import sha256_of
from dscout_jax.weights.targets import LoadedTarget, load_target

CONFIG = runpy.run_path(str(pathlib.Path(__file__).parent / "configs" / "smollm2_dscout.py"))
MIXED, SINGLE = CONFIG["MIXED"], CONFIG["SINGLE"]  # as many slots in a row either way
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp_sanitized", "mt_bench", "self_instruct_user")
BLOCK_SIZES, CUT_BLOCK_SIZE = (4, 8, 16), 8
HELD_OUT_ROWS = 96
CUTS = (
    {"num_layers": 1}, {"num_layers": 2}, {"taps": (4,)}, {"taps": (0, 2, 4)},
    {"num_layers": 1, "taps": (4,)},
)  # fmt: skip
CUT_ARMS = ("dscout", "elastic", "elastic_all")  # elasticity, and its control
REACH = {"weighting": "reach", "smoothing": 0.5, "weight_warmup": 0.2}
ELASTIC = {
    "depths": ((1, 1.0), (2, 1.0), (3, 4.0)),
    "taps": (((4,), 1.0), ((0, 2, 4), 1.0), ((0, 1, 2, 3, 4), 4.0)),
}
# Fields of the objective.
ARMS: dict[str, dict[str, Any]] = {
    "dflash": {"horizons": SINGLE, **METHODS["dflash"]},
    "d_pace": {"horizons": SINGLE, **METHODS["d_pace"]},
    "vat": {"horizons": SINGLE, **METHODS["vat"]},
    "spec_auf": {"horizons": SINGLE, **METHODS["spec_auf"]},
    "mixed": {"horizons": MIXED, **METHODS["dflash"]},
    # The controls of mixing: its decay without it, and it without its decay.
    "mixed_decay_only": {
        "horizons": SINGLE, "weighting": "horizon_decay", "horizon_shares": MIXED,
    },
    "mixed_corrected": {"horizons": MIXED, "horizon_correction": True, **METHODS["dflash"]},
    "unmask_25": {"horizons": SINGLE, "reveal_rate": 0.25},
    "unmask_50": {"horizons": SINGLE, "reveal_rate": 0.5},
    "reach": {"horizons": SINGLE, **REACH},
    "reach_floor": {"horizons": SINGLE, **REACH, "floor": 0.05},
    "dscout": {"horizons": MIXED, **METHODS["dscout"]},
    "dscout_soft": {"horizons": MIXED, **METHODS["dscout"], "prediction": "soft_ce"},
    "elastic": {"horizons": MIXED, **METHODS["dscout"], **ELASTIC},
    "elastic_all": {"horizons": MIXED, **METHODS["dscout"], **ELASTIC, "exits": "all"},
}  # fmt: skip


def names(text: str) -> list[str]:
    """Returns the arms that a comma-separated list names."""
    chosen = text.split(",")
    unknown = [name for name in chosen if name not in ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown arm {unknown[0]!r}; known: {', '.join(ARMS)}")
    return chosen


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", type=names, default=list(ARMS), help="comma-separated")
    parser.add_argument(
        "--seeds", type=lambda text: [int(s) for s in text.split(",")], default=[0],
        help="comma-separated; of anchors and first weights",
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=1500, help="updates of each run")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of training's products; replay and latencies are float32 always",
    )  # fmt: skip
    parser.add_argument("--init", default="target_layers", help="drafter to start every arm from")
    parser.add_argument("--store", default="runs/data/store", help="training answers")
    parser.add_argument("--features", default="runs/data/features", help="their feature cache")
    parser.add_argument("--benchmarks", type=pathlib.Path, default="../shared/data/benchmarks")
    parser.add_argument("--num_prompts", type=int, default=48, help="of each benchmark")
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=8, help="timed rounds of the latencies")
    parser.add_argument("--workdir", type=pathlib.Path, default="runs/ablation")
    parser.add_argument("--output", type=pathlib.Path, default="results/ablation")
    return parser


def make_config(args: argparse.Namespace, arm: str, seed: int) -> ExperimentConfig:
    """Returns the experiment of an arm."""
    values = CONFIG["get_config"]("dflash")
    values.objective.update(ARMS[arm])
    values.drafter.init = args.init
    values.data.store, values.data.feature_cache = args.store, args.features
    values.train.num_steps = args.steps
    values.train.seed = seed
    values.train.compute_dtype = values.data.target_dtype = args.dtype
    values.train.eval_every = max(args.steps // 2, 100)  # the rest is replayed at the end
    values.train.mesh = (1, 1, 1)
    return from_config_dict(values.to_dict())


@dataclasses.dataclass(frozen=True)
class Given:
    """What all runs share.

    Attributes:
        target: the model.
        responses: its answers that drafters are trained on.
        answers_sha256: their fingerprint.
        prompts: benchmark prompts by workload.
    """

    target: LoadedTarget
    responses: Sequence[Response]
    answers_sha256: str
    prompts: Mapping[str, Sequence[Prompt]]


def identity_of(args: argparse.Namespace, arm: str, seed: int, given: Given) -> dict[str, Any]:
    """Returns what the numbers of a run depend on; no folders of this machine."""
    identity = to_dict(make_config(args, arm, seed))
    for name in ("store", "feature_cache"):
        del identity["data"][name]
    init = pathlib.Path(args.init)
    identity["drafter"]["init"] = init.name
    identity["init_sha256"] = sha256_of(init / WEIGHTS_FILE) if init.is_dir() else None
    return identity | {
        "arm": arm,
        "target_sha256": given.target.sha256,
        "answers_sha256": given.answers_sha256,
        "num_prompts": args.num_prompts,
        "max_new_tokens": args.max_new_tokens,
    }


def finish_run(
    args: argparse.Namespace, arm: str, seed: int, given: Given, stop: Callable[[], bool]
) -> Run | None:
    """Returns a run: recorded, else trained, replayed and recorded now; None after a stop."""
    name = f"{arm}-seed{seed}"
    recorded, folder = args.output / "runs" / f"{name}.json", args.workdir / name
    identity = identity_of(args, arm, seed, given)
    run = read_run(recorded, identity, ignored=FREE_FIELDS)
    if run is not None:
        return run
    print(f"--- {arm}, seed {seed}", flush=True)
    config, target = make_config(args, arm, seed), given.target
    if not train(config, folder, target, given.responses, stop=stop).finished:
        return None
    answered = answer_workloads(
        args.workdir / f"answers-{args.num_prompts}x{args.max_new_tokens}",
        given.prompts,
        target,
        config.drafter.target_layer_ids,
        max_new_tokens=args.max_new_tokens,
        say=lambda line: print(line, flush=True),
    )
    loaded = load_drafter(folder / "drafter", target.cfg)
    frozen = freeze(target.params, target.cfg, loaded.token_ids)
    variants = variants_of(target, loaded.config, cuts=arm in CUT_ARMS)
    workloads = (answered, held_out(config, given))
    rows = {
        variant: [
            row for rows in workloads for row in replay_workloads(loaded.params, frozen, rows, cut)
        ]
        for variant, cut in tqdm(variants.items(), desc=name, disable=None)
    }
    metrics = read_jsonl(folder / "metrics.jsonl")
    trained = {
        "drafter_sha256": sha256_of(folder / "drafter" / WEIGHTS_FILE),
        "validation": [row for row in metrics if "validation/loss" in row],
        "environment": describe_environment(),
    }
    run = Run(identity, trained, rows)
    write_run(recorded, run)
    return run


def held_out(config: ExperimentConfig, given: Given) -> Answered:
    """Returns rows of the training data that no run trains on: what arms are chosen by."""
    examples = make_examples(given.responses, config.data.seq_len)
    _, rows = split_examples(examples, config.data.validation_fraction)
    chosen = sample_rows(rows, HELD_OUT_ROWS, seed=config.data.seed)
    target, tap_ids = given.target, config.drafter.target_layer_ids
    width = len(tap_ids) * target.cfg.hidden_size
    settings = feature_settings(target.sha256, tap_ids, width, config.data.target_dtype)
    return Answered({HELD_OUT: chosen}, FeatureCache(config.data.feature_cache, settings))


def finish_runs(args: argparse.Namespace, given: Given) -> dict[str, list[Rows]] | None:
    """Returns the rows of every arm, one entry a seed; None after a stop."""
    arms: dict[str, list[Rows]] = {arm: [] for arm in args.arms}
    with StopRequest() as stop:
        for seed in args.seeds:
            for arm in args.arms:
                run = finish_run(args, arm, seed, given, stop)
                if run is None:
                    return None
                arms[arm].append(run.rows)
    return arms


def variants_of(target: LoadedTarget, drafter: DrafterConfig, cuts: bool) -> dict[str, Variant]:
    """Returns what is replayed, by name: whole at every block size, then cuts at one of them."""
    variants = [Variant(target.cfg, drafter, size) for size in BLOCK_SIZES]
    if cuts:
        variants += [Variant(target.cfg, drafter, CUT_BLOCK_SIZE, **cut) for cut in CUTS]
    return {variant.name: variant for variant in variants}


def measure_latency(args: argparse.Namespace, target: LoadedTarget) -> Latency:
    """Times a plain step and the cycles of every variant, interleaved; weights are random."""
    section = make_config(args, args.arms[0], args.seeds[0]).drafter
    drafter = drafter_of(target.cfg, section)
    frozen = freeze(target.params, target.cfg, np.arange(section.draft_vocab_size))
    params = init_drafter(jax.random.key(0), drafter)
    weights = DraftWeights(params, frozen.tables.head, frozen.token_ids)
    setting = Setting(context=200)
    timers = {"plain": plain_timer(target.params, target.cfg, setting, max(BLOCK_SIZES))}
    for name, variant in variants_of(target, drafter, cuts=True).items():
        timers[name] = cycle_timer(target.params, weights, variant, setting)
    rounds = interleave(timers, args.repeats)
    samples = list(tqdm(rounds, total=args.repeats, desc="latency", disable=None))
    return Latency(medians(samples), samples)


def write_all(args: argparse.Namespace, target: LoadedTarget, arms: Arms) -> None:
    """Times, compares, and writes table, picture and summary."""
    latency = measure_latency(args, target)
    compared = compare(arms, latency)
    write_text(args.output / "rows.csv", csv_table(compared["rows"]))
    text = markdown_table(compared["table"])
    if compared["cuts"]:
        text += "\nCuts of the drafter in depth and taps:\n\n" + markdown_table(compared["cuts"])
    write_text(args.output / "table.md", text)
    ablation_arms(compared["table"], args.output / "ablation.png")
    settings = {k: v.name if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()}
    settings |= {name: pathlib.Path(settings[name]).name for name in ("init", "store", "features")}
    write_json(
        args.output / "summary.json",
        {
            **compared["summary"],
            "latency_s": latency.seconds,
            "arms": {arm: ARMS[arm] for arm in args.arms},
            "settings": settings,
            "environment": describe_environment(),
        },
    )
    write_text(
        args.output / "latency.jsonl", "".join(json.dumps(s) + "\n" for s in latency.samples)
    )
    print(text)


def main() -> None:
    """Trains, measures, writes."""
    args = build_parser().parse_args()
    with one_line_errors("table_ablation"):
        require_writable(args.output)
        require_writable(args.workdir)
        # Arms share most programs: each is compiled once.
        jax.config.update("jax_compilation_cache_dir", str(args.workdir.absolute() / "compiled"))
        responses = load_responses(args.store)
        given = Given(
            target=load_target("smollm2-135m"),
            responses=responses,
            answers_sha256=fingerprint_responses(responses),
            prompts={
                name: load_benchmark(args.benchmarks, name, args.num_prompts) for name in BENCHMARKS
            },
        )
        try:
            arms = finish_runs(args, given)
        except TrainingError as error:
            sys.exit(f"table_ablation: {error}")
        if arms is None:
            sys.exit("table_ablation: stopped; the same command continues")
        write_all(args, given.target, arms)


if __name__ == "__main__":
    main()
