"""Prompts: benchmark sets and training prompts, read from JSON lines.

A line holds `id`, `turns` (the user's texts, unwrapped) and sometimes `reference` (the final
answer). The wrappers that the field puts around a benchmark's raw text are added here, so a
`Prompt` holds what the user says to the model, word for word.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Prompt:
    """What the user says in one conversation.

    Attributes:
        id: unique name, stable over runs.
        workload: name of the benchmark or of the part of the training mixture.
        turns: the user's texts in order; the model answers after each of them.
        reference: final answer where the source knows it, else None.
    """

    id: str
    workload: str
    turns: tuple[str, ...]
    reference: str | None = None


def wrap_boxed(text: str) -> str:
    """Asks for reasoning and a boxed final answer (gsm8k, math500 and their training sets)."""
    return f"{text}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def wrap_completion(text: str) -> str:
    """Asks for a solution to a function stub, shown in a code fence (humaneval)."""
    return (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{text}\n```"
    )


def wrap_nothing(text: str) -> str:
    """Leaves the text as it is."""
    return text


# Source: the wrappers of z-lab/dflash's benchmark script, which SpecForge uses too. The second half
# are the project's own small sets in experiments/prompts, each in the manner of a benchmark.
BENCHMARK_WRAPPERS: dict[str, Callable[[str], str]] = {
    "gsm8k": wrap_boxed,
    "math500": wrap_boxed,
    "humaneval": wrap_completion,
    "mbpp_sanitized": wrap_nothing,
    "mt_bench": wrap_nothing,
    "self_instruct_user": wrap_nothing,
    "vicuna_bench": wrap_nothing,
    "math_word": wrap_boxed,
    "competition_math": wrap_boxed,
    "function_completion": wrap_completion,
    "small_programs": wrap_nothing,
    "chat": wrap_nothing,
    "instructions": wrap_nothing,
}

TRAINING_WRAPPERS: dict[str, Callable[[str], str]] = {
    "gsm8k_train": wrap_boxed,
    "math_train": wrap_boxed,
}


@dataclass(frozen=True)
class MixturePart:
    """A share of the training mixture.

    Attributes:
        share: relative weight, above 0; shares need not sum to one.
        sources: file stems in the folder of training prompts, drawn in proportion to their sizes.
    """

    share: float
    sources: tuple[str, ...]


DEFAULT_MIXTURE: dict[str, MixturePart] = {
    "maths": MixturePart(0.40, ("math_train", "gsm8k_train")),
    "code": MixturePart(0.25, ("gpteacher_code", "mbpp_train", "cpython_docstrings")),
    "chat": MixturePart(
        0.25,
        (
            "dolly_nocontext",
            "gpteacher_roleplay",
            "open_assistant_prompts",
            "self_instruct_seed",
            "awesome_chatgpt_prompts",
        ),
    ),
    "other": MixturePart(
        0.10,
        ("aqua", "fastchat_dummy", "mawps", "mmlu_val", "nq_open_dev", "p3_tasks", "svamp"),
    ),
}


def load_prompt_file(
    path: str | Path, workload: str | None = None, wrap: Callable[[str], str] = wrap_nothing
) -> list[Prompt]:
    """Reads one JSON-lines file of prompts, in file order.

    Args:
        path: the file.
        workload: name given to its prompts; None takes the file's stem.
        wrap: applied to the text of every turn.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a line is no prompt (the message names file and line), or an id occurs twice.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no prompt file {path}; expected a JSON-lines file with the fields id and turns "
            "(see --data_dir)"
        )
    workload = path.stem if workload is None else workload
    prompts, seen = [], set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            prompt = _parse_prompt(line, workload, wrap, where=f"{path}, line {number}")
            if prompt.id in seen:
                raise ValueError(f"{path}, line {number}: id {prompt.id!r} occurs twice")
            seen.add(prompt.id)
            prompts.append(prompt)
    return prompts


def load_prompts(path: str | Path) -> list[Prompt]:
    """Reads a file of prompts, or every `.jsonl` file of a folder in the order of their names.

    Raises:
        FileNotFoundError: no such file, or no `.jsonl` file in the folder.
        ValueError: see `load_prompt_file`; also if two files share an id.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise FileNotFoundError(
            f"no prompts in {path}; expected JSON-lines files with the fields id and turns"
        )
    prompts = [prompt for file in files for prompt in load_prompt_file(file)]
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError(f"two prompts of the files in {path} share an id")
    return prompts


def load_benchmark(
    benchmarks_dir: str | Path, name: str, limit: int | None = None, seed: int | None = 42
) -> list[Prompt]:
    """Reads a benchmark's prompts with the field's wrapper around them.

    Args:
        benchmarks_dir: folder that holds `<name>.jsonl`.
        name: one of `BENCHMARK_WRAPPERS`.
        limit: how many prompts to take, None for all.
        seed: order of the prompts, a hash of seed and id, so that a smaller limit takes a prefix
            of what a larger one takes; None keeps the file's order.

    Raises:
        FileNotFoundError: the folder or the file is missing.
        ValueError: unknown name, limit below 1, or a malformed line.
    """
    if name not in BENCHMARK_WRAPPERS:
        raise ValueError(
            f"unknown benchmark {name!r}; allowed: {', '.join(sorted(BENCHMARK_WRAPPERS))}"
        )
    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} must be at least 1 (None takes all prompts)")
    folder = _existing_folder(benchmarks_dir, "benchmark prompts", f"{name}.jsonl")
    prompts = load_prompt_file(folder / f"{name}.jsonl", name, BENCHMARK_WRAPPERS[name])
    if seed is not None:
        prompts = _hash_order(prompts, seed)
    return prompts[:limit]


def load_training_prompts(
    data_dir: str | Path, mixture: Mapping[str, MixturePart] | None = None, seed: int = 0
) -> list[Prompt]:
    """Reads all training prompts in the order in which they are to be answered.

    The parts of the mixture are interleaved by their shares, so that every prefix of the list has
    the mixture's proportions until a part runs out; the others then go on without it. The order
    depends on seed, ids and shares only.

    Args:
        data_dir: folder that holds `train_prompts/<source>.jsonl`.
        mixture: workload name to its share and sources; None takes `DEFAULT_MIXTURE`.
        seed: order inside each part.

    Raises:
        FileNotFoundError: the folder or a file of the mixture is missing.
        ValueError: a share is not above 0, a source stands in two parts, or a malformed line.
    """
    mixture = DEFAULT_MIXTURE if mixture is None else mixture
    folder = _existing_folder(
        Path(data_dir) / "train_prompts", "training prompts", "gsm8k_train.jsonl"
    )
    _check_mixture(mixture)
    parts = {}
    for workload, part in mixture.items():
        prompts = []
        for source in part.sources:
            wrap = TRAINING_WRAPPERS.get(source, wrap_nothing)
            prompts += load_prompt_file(folder / f"{source}.jsonl", workload, wrap)
        parts[workload] = _hash_order(prompts, seed)
    return _interleave(parts, {workload: part.share for workload, part in mixture.items()})


def _parse_prompt(line: str, workload: str, wrap: Callable[[str], str], where: str) -> Prompt:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not a JSON object: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("id"), str):
        raise ValueError(f"{where}: a prompt needs a field id (text)")
    turns = record.get("turns")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(turn, str) and turn.strip() for turn in turns)
    ):
        raise ValueError(f"{where}: a prompt needs a field turns, a list of non-empty texts")
    reference = record.get("reference")
    return Prompt(
        id=record["id"],
        workload=workload,
        turns=tuple(wrap(turn) for turn in turns),
        reference=None if reference is None else str(reference),
    )


def _existing_folder(folder: str | Path, what: str, example: str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"no folder {folder}: the {what} are expected there (files such as {example}); "
            "say where they are with --data_dir (or --benchmarks)"
        )
    return folder


def _check_mixture(mixture: Mapping[str, MixturePart]) -> None:
    if not mixture:
        raise ValueError("the mixture is empty; it needs at least one part")
    owner: dict[str, str] = {}
    for workload, part in mixture.items():
        if not part.share > 0:
            raise ValueError(f"mixture part {workload!r}: share={part.share} must be above 0")
        for source in part.sources:
            if source in owner:
                raise ValueError(
                    f"mixture: source {source!r} stands in {owner[source]!r} and in {workload!r}"
                )
            owner[source] = workload


def _hash_order(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    def rank(prompt: Prompt) -> bytes:
        return hashlib.sha256(f"{seed}:{prompt.id}".encode()).digest()

    return sorted(prompts, key=rank)


def _interleave(parts: Mapping[str, Sequence[Prompt]], shares: Mapping[str, float]) -> list[Prompt]:
    """Merges the parts; the next prompt comes from the part that is furthest behind its share."""
    total = sum(shares.values())
    taken = dict.fromkeys(parts, 0)
    merged: list[Prompt] = []
    for count in range(1, sum(len(part) for part in parts.values()) + 1):
        open_parts = [name for name, part in parts.items() if taken[name] < len(part)]
        name = max(open_parts, key=lambda n: shares[n] / total * count - taken[n])
        merged.append(parts[name][taken[name]])
        taken[name] += 1
    return merged
