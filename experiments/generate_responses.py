r"""Has the target answer the training prompts; the answers are what a drafter is trained on.

Writes one JSON line an answer, resumes where an earlier run was stopped (by Ctrl-C, SIGTERM or kill
-9), and at the end builds the store that training opens. Example, a few hours on two cores:

    python experiments/generate_responses.py --output runs/data/smollm2_greedy.jsonl \
        --num_prompts 12000 --skip_jsonl ../shared/data/responses/smollm2_greedy.jsonl \
        --store runs/data/store

The result does not depend on the number of slots, on the order or on interruptions: sampled rows
draw from a key folded from the prompt's id (a different batch shape can still swap two logits that
are nearly tied).
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from tqdm import tqdm

from dscout_jax.data.features import FeatureWriter, feature_settings
from dscout_jax.data.generation import GenerationSettings, Request, generate_into
from dscout_jax.data.loops import LOOP_NGRAM
from dscout_jax.data.packed import is_packed, read_packed, write_packed
from dscout_jax.data.prompts import (
    DEFAULT_MIXTURE,
    MixturePart,
    Prompt,
    load_prompts,
    load_training_prompts,
)
from dscout_jax.data.responses import Response, ResponseWriter, read_responses, read_settings
from dscout_jax.data.tokenizer import Tokenizer
from dscout_jax.files import require_writable
from dscout_jax.training.interrupt import StopRequest
from dscout_jax.weights.download import WeightsError
from dscout_jax.weights.targets import TARGETS, load_target, load_vocabulary

_TARGET = flags.DEFINE_enum("target", "smollm2-135m", sorted(TARGETS), "Model that answers.")
_DATA_DIR = flags.DEFINE_string("data_dir", "../shared/data", "Folder that has train_prompts/.")
_PROMPTS = flags.DEFINE_string(
    "prompts",
    None,
    "Prompts of your own instead: a JSON-lines file with id and turns, or a folder of such files. "
    "The first turn is answered.",
)
_OUTPUT = flags.DEFINE_string("output", None, "JSON-lines file to write or go on with.")
_NUM_PROMPTS = flags.DEFINE_integer(
    "num_prompts", None, "Answer the first so many prompts of the mixture; all by default.", 1
)
_MIXTURE = flags.DEFINE_list(
    "mixture",
    None,
    "Shares of the parts, such as maths=0.4,code=0.3,chat=0.3; parts left out are not drawn. "
    f"Parts: {', '.join(DEFAULT_MIXTURE)}.",
)
_SKIP_JSONL = flags.DEFINE_multi_string(
    "skip_jsonl",
    [],
    "Files of answers made elsewhere: their prompts are not answered again, their rows go into the "
    "store too. A packed file (.jsonl.xz) finds its prompts in --data_dir or --prompts. May be "
    "repeated.",
)
_SLOTS = flags.DEFINE_integer("slots", 64, "Rows decoded side by side.", 1)
_MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 256, "Longest answer in tokens.", 1)
_MAX_PROMPT_TOKENS = flags.DEFINE_integer(
    "max_prompt_tokens", 192, "Prompts longer than this are left out and counted.", 1
)
_REFILL_STEPS = flags.DEFINE_integer(
    "refill_steps", 16, "Tokens decoded in each row between two looks at finished rows.", 1
)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", 0.0)
_SEED = flags.DEFINE_integer("seed", 0, "Order of the prompts, and sampling if temperature > 0.")
_STOP_AT_LOOP = flags.DEFINE_boolean(
    "stop_at_loop",
    True,
    f"End an answer once a {LOOP_NGRAM}-gram repeats; training cuts it there anyway.",
)
_FEATURES = flags.DEFINE_string(
    "features",
    None,
    "Feature cache to fill on the way: the target's hidden states, which training reads, come free "
    "with the answers and cost as much again later. Needs --tap_ids.",
)
_TAP_IDS = flags.DEFINE_list(
    "tap_ids", None, "Target layers of --features, 0-based; drafter.target_layer_ids in training."
)
_CACHE_DIR = flags.DEFINE_string("cache_dir", None, "Where model files are kept.")
_STORE = flags.DEFINE_string("store", None, "Folder of the store to build from all answers.")
_BUILD_STORE_ONLY = flags.DEFINE_boolean(
    "build_store_only", False, "Build --store and --pack from what exists; generate nothing."
)
_PACK = flags.DEFINE_string(
    "pack", None, "Write the answers of --output, without their prompts, to this .jsonl.xz file."
)


@dataclasses.dataclass(frozen=True)
class Answers:
    """The rows of one file and the settings that they depend on, None where unknown."""

    file: str
    responses: Sequence[Response]
    settings: dict[str, Any] | None


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], max_prompt_tokens: int
) -> tuple[list[Request], int, int]:
    """Returns the prompts as token ids and how many were left out.

    Returns:
        The requests, the number of prompts longer than `max_prompt_tokens`, and the number of
        prompts with a character that the vocabulary lacks.

    Raises:
        ValueError: a prompt has more than one turn.
    """
    requests, num_long, num_inexpressible = [], 0, 0
    for prompt in prompts:
        if len(prompt.turns) != 1:
            raise ValueError(f"prompt {prompt.id!r} has {len(prompt.turns)} turns, allowed is 1")
        try:
            ids = tokenizer.chat_prompt([{"role": "user", "content": prompt.turns[0]}])
        except ValueError as error:
            logging.debug("prompt %s left out: %s", prompt.id, error)
            num_inexpressible += 1
            continue
        if len(ids) > max_prompt_tokens:
            num_long += 1
            continue
        requests.append(Request(prompt.id, tuple(ids)))
    return requests, num_long, num_inexpressible


def parse_mixture(shares: Sequence[str] | None) -> Mapping[str, MixturePart]:
    """Returns the mixture that `--mixture` describes.

    Raises:
        ValueError: an entry is not `part=share` with a known part.
    """
    if shares is None:
        return DEFAULT_MIXTURE
    mixture = {}
    for entry in shares:
        name, _, share = entry.partition("=")
        try:
            mixture[name] = dataclasses.replace(DEFAULT_MIXTURE[name], share=float(share))
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"--mixture entry {entry!r} is not part=share with a part of "
                f"{', '.join(DEFAULT_MIXTURE)}"
            ) from error
    return mixture


def parse_tap_ids() -> tuple[int, ...]:
    """Returns the layers whose hidden states are kept, none without `--features`.

    Raises:
        ValueError: one of the two flags is missing, or no increasing numbers were given.
    """
    if (_FEATURES.value is None) != (_TAP_IDS.value is None):
        raise ValueError("--features and --tap_ids need each other")
    given = _TAP_IDS.value or []
    ids = tuple(int(entry) for entry in given if entry.strip().isdigit())
    if len(ids) < len(given) or list(ids) != sorted(set(ids)):
        raise ValueError(f"--tap_ids={','.join(given)} must be increasing numbers such as 1,8,14")
    return ids


def read_prompts() -> list[Prompt]:
    """Returns the prompts of `--prompts`, else of the mixture.

    Raises:
        ValueError, FileNotFoundError: both were given, or a missing or malformed file.
    """
    if _PROMPTS.value is None:
        return load_training_prompts(_DATA_DIR.value, parse_mixture(_MIXTURE.value), _SEED.value)
    if _MIXTURE.value is not None:
        raise ValueError("--prompts and --mixture exclude each other; give one of them")
    return [
        dataclasses.replace(prompt, turns=prompt.turns[:1])
        for prompt in load_prompts(_PROMPTS.value)
    ]


def answer_prompts(elsewhere: Sequence[Answers], stop: Callable[[], bool]) -> bool:
    """Generates what the flags ask for and appends it to `--output`.

    Args:
        elsewhere: files of answers whose prompts are not answered again.
        stop: asked after every round.

    Returns:
        Whether all is answered; False after a stop request.
    """
    settings = GenerationSettings(
        slots=_SLOTS.value,
        max_prompt_tokens=_MAX_PROMPT_TOKENS.value,
        max_new_tokens=_MAX_NEW_TOKENS.value,
        refill_steps=_REFILL_STEPS.value,
        temperature=_TEMPERATURE.value,
        seed=_SEED.value,
        loop_ngram=LOOP_NGRAM if _STOP_AT_LOOP.value else None,
        tap_ids=parse_tap_ids(),
    )
    prompts = read_prompts()[: _NUM_PROMPTS.value]
    answered = {row.id for answers in elsewhere for row in answers.responses}
    target = load_target(_TARGET.value, cache_dir=cache_dir())
    tokenizer = Tokenizer(target.vocabulary)
    recorded = {
        "target": target.name,
        "target_sha256": target.sha256,
        "template_sha256": tokenizer.template_sha256,
        "temperature": settings.temperature,
        "seed": settings.seed if settings.temperature > 0 else None,
        "max_new_tokens": settings.max_new_tokens,
        "loop_ngram": settings.loop_ngram,
        "dtype": "float32",
    }
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(ResponseWriter(_OUTPUT.value, recorded))
        features = None
        if settings.tap_ids:
            width = len(settings.tap_ids) * target.cfg.hidden_size
            of_target = feature_settings(target.sha256, settings.tap_ids, width)
            features = stack.enter_context(FeatureWriter(_FEATURES.value, of_target))
        todo = [p for p in prompts if p.id not in writer.done and p.id not in answered]
        requests, num_long, num_inexpressible = encode_prompts(
            tokenizer, todo, settings.max_prompt_tokens
        )
        logging.info(
            "%d prompts: %d answered already, %d to do, left out %d longer than %d tokens and %d "
            "with a character that the vocabulary lacks",
            len(prompts), len(prompts) - len(todo), len(requests), num_long,
            settings.max_prompt_tokens, num_inexpressible,
        )  # fmt: skip
        start, num_tokens = time.monotonic(), 0
        # A log file gets a line now and then, a terminal a living bar.
        interval = 0.5 if sys.stderr.isatty() else 30.0
        with tqdm(total=len(requests), unit="row", mininterval=interval) as bar:
            for responses in generate_into(
                writer,
                features,
                target.params,
                target.cfg,
                requests,
                tokenizer.stop_ids,
                settings,
            ):
                num_tokens += sum(len(response.response) for response in responses)
                speed = num_tokens / (time.monotonic() - start)
                bar.set_postfix_str(f"{speed:.0f} tokens/s", refresh=False)
                bar.update(len(responses))
                if stop():
                    return False
    return True


def cache_dir() -> Path | None:
    """Returns where model files are kept; None = the default place."""
    return None if _CACHE_DIR.value is None else Path(_CACHE_DIR.value)


def find_prompts(ids: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the token ids of those prompts that `--prompts` or `--data_dir` has, by id."""
    wanted = set(ids)
    known = read_prompts() if _PROMPTS.value else load_training_prompts(_DATA_DIR.value)
    tokenizer = Tokenizer(load_vocabulary(_TARGET.value, cache_dir=cache_dir()))
    chosen = [prompt for prompt in known if prompt.id in wanted]
    requests, _, _ = encode_prompts(tokenizer, chosen, sys.maxsize)
    return {request.id: request.prompt for request in requests}


def read_answers(path: str) -> Answers:
    """Reads a file of answers, packed or not.

    Raises:
        FileNotFoundError, ValueError: it is missing or malformed.
    """
    name = Path(path).name
    if is_packed(path):
        return Answers(name, *read_packed(path, find_prompts))
    responses = read_responses([path])
    try:
        return Answers(name, responses, read_settings(path))
    except FileNotFoundError:
        return Answers(name, responses, None)


def store_answers(files: Sequence[Answers]) -> None:
    """Builds the store; of rows with equal ids the first is kept."""
    from dscout_jax.data.store import build_store  # heavy, and not every call builds a store

    by_id: dict[str, Response] = {}
    for answers in files:
        if answers.settings is None:
            logging.warning("%s has no settings beside it; stored as unknown", answers.file)
        by_id = {response.id: response for response in answers.responses} | by_id
    sources = [{"file": answers.file, "settings": answers.settings} for answers in files]
    store = build_store(list(by_id.values()), _STORE.value, {"sources": sources})
    logging.info("store %s: %d rows", _STORE.value, len(store))


def pack_answers(answers: Answers) -> None:
    """Writes answers to `--pack`."""
    write_packed(_PACK.value, answers.responses, answers.settings or {})
    logging.info("%s: %d rows", _PACK.value, len(answers.responses))


def main(_: Sequence[str]) -> None:
    """Runs what the flags ask for; errors end the program with one line."""
    logging.set_verbosity(logging.INFO)
    try:
        if _BUILD_STORE_ONLY.value and _STORE.value is None and _PACK.value is None:
            raise ValueError("--build_store_only needs --store or --pack")
        if _PACK.value is not None:
            if _OUTPUT.value is None or not is_packed(_PACK.value):
                raise ValueError("--pack needs --output and a name that ends with .jsonl.xz")
            require_writable(Path(_PACK.value).parent)
        if _STORE.value is not None:
            from dscout_jax.data.store import require_store_place  # heavy, as above

            require_store_place(_STORE.value)
        if not _BUILD_STORE_ONLY.value and _OUTPUT.value is None:
            raise ValueError("--output is missing: the JSON-lines file to write")
        elsewhere = [read_answers(path) for path in _SKIP_JSONL.value]
        if not _BUILD_STORE_ONLY.value:
            with StopRequest() as stop:
                finished = answer_prompts(elsewhere, stop)
            if not finished:
                print("stopped; finished answers are kept, the same command goes on")
                return
        if _STORE.value is not None or _PACK.value is not None:
            own = [] if _OUTPUT.value is None else [read_answers(_OUTPUT.value)]
            if _STORE.value is not None:
                store_answers([*own, *elsewhere])
            if _PACK.value is not None:
                pack_answers(*own)
    except KeyboardInterrupt:
        print("\ninterrupted; finished answers are kept, the same command goes on", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError, WeightsError) as error:
        sys.exit(f"generate_responses: {error}")


if __name__ == "__main__":
    app.run(main)
