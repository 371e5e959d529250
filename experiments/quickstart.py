r"""Answers prompts twice, plainly and speculatively, and shows what speculation is worth.

    python experiments/quickstart.py
    python experiments/quickstart.py --smoke
    python experiments/quickstart.py --prompt "Why is the sky blue?"
    python experiments/quickstart.py --benchmarks ../shared/data/benchmarks --num_prompts 16

Both ways are compiled before the clock starts, run at batch 1 and temperature 0, and are compared
token by token. Every block size that was asked for is measured and reported; the main table shows
each workload at its best one, judged by the loop-free speedup on the same prompts.
"""

import argparse
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn, TextIO

from tqdm import tqdm

from dscout_jax.data.prompts import Prompt, load_benchmark
from dscout_jax.data.tokenizer import StreamDecoder, Tokenizer
from dscout_jax.decoding.speculative import make_draft_weights
from dscout_jax.evaluation.benchmarks import Measurement, as_row, measure_prompt
from dscout_jax.evaluation.report import describe_environment
from dscout_jax.evaluation.results import best_rows, mean_rows, summarize_all, write_results
from dscout_jax.evaluation.runners import Runners, fit_sizes
from dscout_jax.evaluation.tables import console_table
from dscout_jax.files import require_writable, write_json
from dscout_jax.throughput.latency import Setting, interleave, medians, phase_timers
from dscout_jax.weights.dflash import WEIGHTS_FILE, LoadedDrafter, check_target, load_drafter
from dscout_jax.weights.download import WeightsError, sha256_of
from dscout_jax.weights.targets import TARGETS, load_target

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
OWN_PROMPTS = REPOSITORY / "experiments" / "prompts"
OWN_DRAFTER = REPOSITORY / "drafters" / "smollm2-135m-dscout"
OWN_WORKLOADS = (
    "math_word",
    "competition_math",
    "function_completion",
    "small_programs",
    "chat",
    "instructions",
)
BENCHMARKS = (
    "gsm8k",
    "math500",
    "humaneval",
    "mbpp_sanitized",
    "mt_bench",
    "self_instruct_user",
)
BLOCK_SIZES, OWN_BLOCK_SIZES = (4, 8, 16), (4, 8)
PROMPT_ORDER_SEED = 42
TEMPLATE_TOKENS = 8  # what the chat template adds to a turn, at most
ACCEPTED_ON, ACCEPTED_OFF = "\x1b[1;32m", "\x1b[0m"


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        self.exit(2, f"quickstart: {message}; --help lists what is allowed\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = OneLineParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to answer (default: the project's own prompts)")
    what.add_argument("--benchmarks", type=pathlib.Path, metavar="DIR", help="the real sets")
    what.add_argument("--prompt", help="one prompt; the answer streams, accepted runs marked")
    what.add_argument("--workloads", nargs="+", metavar="NAME", help="only these workloads")
    what.add_argument("--num_prompts", type=int, help="a workload (default: 4 own, 16 real)")
    what.add_argument("--smoke", action="store_true", help="a few prompts, within a minute")
    how = parser.add_argument_group("how")
    how.add_argument("--target", default="smollm2-135m", help=f"one of {', '.join(TARGETS)}")
    how.add_argument("--drafter", type=pathlib.Path, metavar="DIR", default=OWN_DRAFTER)
    how.add_argument("--block_size", type=int, nargs="+", help="default: 4 8 own, 4 8 16 real")
    how.add_argument("--max_new_tokens", type=int, help="default: 64 own, 128 real")
    how.add_argument("--max_context", type=int, default=2048, help="cache positions at most")
    where = parser.add_argument_group("where results go")
    where.add_argument(
        "--output",
        type=pathlib.Path,
        metavar="DIR",
        help="default: runs/quickstart own, results/quickstart real",
    )
    where.add_argument("--json", type=pathlib.Path, metavar="FILE", help="table and rows in one")
    return parser


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in what depends on the mode and checks what needs no file.

    Raises:
        ValueError: a value out of range, or two modes at once.
    """
    if args.prompt is not None and args.benchmarks is not None:
        raise ValueError("--prompt and --benchmarks exclude each other; give one of them")
    if args.prompt is not None and not args.prompt.strip():
        raise ValueError("--prompt is empty; give some text to answer")
    if args.prompt is not None:
        for name in ("workloads", "num_prompts", "smoke", "json"):
            if getattr(args, name):
                raise ValueError(f"--{name} has no meaning with --prompt; leave one of them out")
    if args.target not in TARGETS:
        raise ValueError(f"--target={args.target} is unknown; allowed: {', '.join(TARGETS)}")
    known = OWN_WORKLOADS if args.benchmarks is None else BENCHMARKS
    args.workloads = args.workloads or known
    for name in args.workloads:
        if name not in known:
            raise ValueError(f"--workloads: {name!r} is unknown; allowed: {', '.join(known)}")
    if args.num_prompts is None:
        args.num_prompts = 1 if args.smoke else 4 if args.benchmarks is None else 16
    if args.max_new_tokens is None:
        args.max_new_tokens = 24 if args.smoke else 64 if args.benchmarks is None else 128
    if args.output is None:
        args.output = pathlib.Path("runs" if args.benchmarks is None else "results", "quickstart")
    # The first token is the prefill's: from two on there is a cycle to measure.
    for name, least in (("num_prompts", 1), ("max_new_tokens", 2), ("max_context", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"--{name}={getattr(args, name)} must be at least {least}")
    return args


def choose_block_sizes(args: argparse.Namespace, trained: int) -> tuple[int, ...]:
    """Returns the block sizes to run.

    Raises:
        ValueError: one is below 2 or above what the drafter was trained for.
    """
    if args.block_size is None:
        sizes = OWN_BLOCK_SIZES if args.benchmarks is None else BLOCK_SIZES
        fitting = [size for size in sizes if size <= trained] or [trained]
        one = args.smoke or args.prompt is not None
        return (min(fitting, key=lambda size: abs(size - 8)),) if one else tuple(fitting)
    for size in args.block_size:
        if not 2 <= size <= trained:
            raise ValueError(
                f"--block_size={size} is not allowed; the drafter in {args.drafter} was trained "
                f"for block sizes 2 to {trained}"
            )
    return tuple(dict.fromkeys(args.block_size))


def say(text: str) -> None:
    """Tells a person what is going on, beside the results on stdout."""
    print(text, file=sys.stderr, flush=True)


def prepare(
    args: argparse.Namespace, prompts: Sequence[Prompt], drafter: LoadedDrafter
) -> tuple[Runners, Tokenizer, dict[str, str]]:
    """Loads the target, compiles every program; returns decoders, tokenizer and file hashes.

    Raises:
        WeightsError: no or a damaged target file, or a drafter made for another target.
        ValueError: a prompt longer than the cache.
    """
    block_sizes = choose_block_sizes(args, drafter.config.block_size)
    say(f"loading {args.target} (fetched on first use) and the drafter in {args.drafter}")
    target = load_target(args.target)
    check_target(drafter.config, target.cfg, args.drafter)
    tokenizer = Tokenizer(target.vocabulary)
    weights = make_draft_weights(target.params, target.cfg, drafter.params, drafter.token_ids)
    sizes = fit_sizes(
        prompt_lens(prompts, tokenizer, args.max_new_tokens),
        args.max_new_tokens,
        max(block_sizes),
        min(args.max_context, target.cfg.max_position_embeddings),
    )
    runners = Runners(
        target.params,
        target.cfg,
        weights,
        drafter.config,
        block_sizes=block_sizes,
        stop_ids=tokenizer.stop_ids,
        sizes=sizes,
    )
    start = time.perf_counter()
    num_programs = 1 + len(block_sizes) + len(sizes.widths)
    with tqdm(total=num_programs, unit="program", disable=None, leave=False) as bar:
        for name in runners.compile():
            bar.set_description(f"compiling {name}")
            bar.update()
    took = time.perf_counter() - start
    say(f"compiled block sizes {', '.join(map(str, block_sizes))} in {took:.1f} s")
    hashes = {
        "target_sha256": target.sha256,
        "drafter_sha256": sha256_of(args.drafter / WEIGHTS_FILE),
    }
    return runners, tokenizer, hashes


def prompt_lens(prompts: Iterable[Prompt], tokenizer: Tokenizer, max_new_tokens: int) -> list[int]:
    """Returns the length in tokens of each turn's prompt; answers count at their longest."""
    lens = []
    for prompt in prompts:
        messages = []
        for turn, text in enumerate(prompt.turns):
            messages.append({"role": "user", "content": text})
            answers = turn * (max_new_tokens + TEMPLATE_TOKENS)
            lens.append(len(tokenizer.chat_prompt(messages)) + answers)
    return lens


def load_prompts(args: argparse.Namespace) -> list[Prompt]:
    """Returns the prompts of the workloads, or the one of --prompt.

    Raises:
        ValueError, FileNotFoundError: a missing or malformed file.
    """
    if args.prompt is not None:
        return [Prompt(id="prompt", workload="prompt", turns=(args.prompt,))]
    folder, seed = (OWN_PROMPTS, None)
    if args.benchmarks is not None:
        folder, seed = (args.benchmarks, PROMPT_ORDER_SEED)
        if not folder.is_dir():
            raise ValueError(f"--benchmarks={folder} is no folder; it must hold gsm8k.jsonl etc.")
    return [
        prompt
        for name in args.workloads
        for prompt in load_benchmark(folder, name, args.num_prompts, seed)
    ]


def run_workloads(args: argparse.Namespace) -> int:
    """Measures the workloads and reports; returns the exit code."""
    start = time.perf_counter()
    prompts = load_prompts(args)
    if args.json is not None and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise ValueError(
            f"--json={args.json} cannot be written; name a file in a folder that exists"
        )
    drafter = load_drafter(args.drafter)
    choose_block_sizes(args, drafter.config.block_size)  # fails before anything is written
    require_writable(args.output)
    runners, tokenizer, hashes = prepare(args, prompts, drafter)

    (args.output / "summary.json").unlink(missing_ok=True)  # never beside rows of another run
    found: list[Measurement] = []
    is_complete = False
    with (args.output / "rows.jsonl").open("w", encoding="utf-8") as rows:
        try:
            for measurement in measure_all(args, prompts, runners, tokenizer):
                found.append(measurement)
                rows.write(json.dumps(as_row(measurement)) + "\n")
                rows.flush()
            is_complete = True
        except KeyboardInterrupt:
            say(f"interrupted; {len(found)} measurements are kept in {args.output}")
    if not any(measurement.answer.speculative.cycles for measurement in found):
        say("nothing was measured; no summary is written")
        return 130 if not is_complete else 1
    extra = {
        "phase_ms": None if args.smoke or not is_complete else phase_ms(runners),
        **describe_environment(),
        **hashes,
        "complete": is_complete,
        "settings": {
            k: v.name if isinstance(v, pathlib.Path) else v for k, v in vars(args).items()
        },
        "seeds": {"prompt_order": PROMPT_ORDER_SEED, "bootstrap": 0},
        "wall_s": time.perf_counter() - start,
    }
    summary = write_results(args.output, found, extra)
    if args.json is not None:
        write_json(args.json, {**summary, "rows": [as_row(measurement) for measurement in found]})
    show(found, summary, args.output)
    return 130 if not is_complete else 0 if summary["identical"] else 1


def measure_all(
    args: argparse.Namespace, prompts: Sequence[Prompt], runners: Runners, tokenizer: Tokenizer
) -> Iterator[Measurement]:
    """Yields all measurements; a bar on a terminal, a line a workload elsewhere."""
    with tqdm(total=len(prompts), unit="prompt", disable=None) as bar:
        workload = None
        for prompt in prompts:
            if prompt.workload != workload:
                workload = prompt.workload
                bar.set_description(workload)
                if bar.disable:
                    say(f"answering {workload}")
            yield from measure_prompt(
                prompt,
                tokenizer=tokenizer,
                plain=runners.plain,
                speculative=runners.speculative,
                margin=runners.margin,
                max_new_tokens=args.max_new_tokens,
            )
            bar.update()


def phase_ms(runners: Runners) -> dict[int, dict[str, float]]:
    """Returns the median milliseconds of the draft and the verify forward by block size."""
    say("timing the phases of a cycle")
    setting, found = Setting(context=256), {}
    for size, variant in runners.variants.items():
        timers = phase_timers(runners.params, runners.weights, variant, setting)
        middle = medians(list(interleave(timers, repeats=8)))
        found[size] = {name: 1e3 * seconds for name, seconds in middle.items()}
    return found


def show(found: Sequence[Measurement], summary: dict, output: pathlib.Path) -> None:
    """Prints the tables, the differences and where the files are."""
    summaries = summarize_all(found)
    print(console_table(best_rows(summaries)))
    print(console_table(mean_rows(summaries)))
    for size, phases in (summary["phase_ms"] or {}).items():
        parts = ", ".join(f"{name} {value:.1f} ms" for name, value in phases.items())
        print(f"block size {size}: {parts} a cycle")
    for measurement in found:
        answer = measurement.answer
        if answer.divergence is not None:
            kind = "near tie" if answer.is_near_tie else "DIFFERENCE"
            print(
                f"{kind}: {answer.prompt_id} turn {answer.turn}, block size "
                f"{measurement.block_size}, token {answer.divergence}, margin {answer.margin:.1e}"
            )
    print(
        "MAT: mean tokens a cycle emits. Loop-free: up to the first repeated 16-gram. [low, high]: "
        "bootstrap 95 % over prompts.\n"
        f"All block sizes, rows, pictures: {output}; peak memory "
        f"{summary['peak_memory_gib']:.1f} GiB, {summary['wall_s']:.0f} s in all"
    )


def show_prompt(args: argparse.Namespace, stream: TextIO) -> int:
    """Streams the answer to --prompt with accepted runs marked; returns the exit code."""
    prompts = load_prompts(args)
    runners, tokenizer, _ = prepare(args, prompts, load_drafter(args.drafter))
    block_size = next(iter(runners.speculative))
    prompt_ids = tokenizer.chat_prompt([{"role": "user", "content": prompts[0].turns[0]}])
    marks = (ACCEPTED_ON, ACCEPTED_OFF) if use_colour(stream) else ("[", "]")
    decoder = StreamDecoder(tokenizer)
    lengths: list[int] = []

    def write(tokens: tuple[int, ...]) -> None:
        stream.write(mark_accepted(tokens, decoder, marks))
        stream.flush()
        lengths.append(len(tokens))

    start = time.perf_counter()
    try:
        runners.stream(prompt_ids, args.max_new_tokens, block_size, write)
        seconds = time.perf_counter() - start
    finally:
        stream.write(decoder.flush() + "\n")
        stream.flush()
    cycles = lengths[1:]  # the first token is the prefill's
    say(
        f"accepted drafts are {'coloured' if marks[0] == ACCEPTED_ON else 'in brackets'}; "
        f"{sum(lengths)} tokens in {seconds:.2f} s, MAT {sum(cycles) / max(len(cycles), 1):.2f} "
        f"over {len(cycles)} cycles of block size {block_size}"
    )
    return 0


def mark_accepted(tokens: Sequence[int], decoder: StreamDecoder, marks: tuple[str, str]) -> str:
    """Returns the text of one cycle: accepted drafts between marks, then the target's own token."""
    accepted = decoder.push(tokens[:-1])
    own = decoder.push(tokens[-1:])
    return (f"{marks[0]}{accepted}{marks[1]}" if accepted else "") + own


def use_colour(stream: TextIO) -> bool:
    """Whether the stream is a terminal that wants colour."""
    return stream.isatty() and "NO_COLOR" not in os.environ


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what the flags ask for; what the user can mend ends it with one line, exit code 2."""
    args = build_parser().parse_args(arguments)
    try:
        args = complete(args)
        return run_workloads(args) if args.prompt is None else show_prompt(args, sys.stdout)
    except (ValueError, OSError, WeightsError) as error:
        say("quickstart: " + " ".join(str(error).split()))
        return 2
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
