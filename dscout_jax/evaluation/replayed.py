"""MAT of many drafters on the same answers: the target answers once, every drafter is replayed.

At temperature 0 the answer is the target's own whatever drafts it, so accepted lengths need no
decoding; times need no trained weights. Speed is the one over the other (METHOD section 4).
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from dscout_jax.data.features import FeatureCache, FeatureWriter, feature_settings
from dscout_jax.data.generation import GenerationSettings, Request, generate_into
from dscout_jax.data.loops import loop_start
from dscout_jax.data.pipeline import ExampleSet, evaluation_batches, make_examples
from dscout_jax.data.prompts import Prompt
from dscout_jax.data.responses import ResponseWriter, iter_responses
from dscout_jax.data.tokenizer import Tokenizer
from dscout_jax.decoding.variant import Variant
from dscout_jax.evaluation.statistics import walk_prefix
from dscout_jax.training.inputs import trim_batch
from dscout_jax.training.validation import FrozenTarget, replay
from dscout_jax.weights.targets import LoadedTarget

_BATCH_ROWS = 8
_LENGTH_MULTIPLE = 64


@dataclasses.dataclass(frozen=True)
class Answered:
    """The target's answers to the first turns of some workloads, with its features.

    Attributes:
        examples: the answers of each workload.
        features: of all of them.
    """

    examples: Mapping[str, ExampleSet]
    features: FeatureCache


@dataclasses.dataclass(frozen=True)
class ReplayedRow:
    """One answer as one drafter would have produced it.

    Attributes:
        workload: name of its benchmark.
        prompt_id: of the prompt.
        tokens: tokens that cycles emit.
        cycles: how many cycles.
        free_tokens: tokens before the answer's first repeated 16-gram.
        free_cycles: cycles that begin before it.
    """

    workload: str
    prompt_id: str
    tokens: int
    cycles: int
    free_tokens: int
    free_cycles: int


def answer_workloads(
    folder: Path,
    prompts: Mapping[str, Sequence[Prompt]],
    target: LoadedTarget,
    tap_ids: Sequence[int],
    *,
    max_new_tokens: int,
    say: Callable[[str], None],
    slots: int = 24,
) -> Answered:
    """Has the target answer the prompts greedily; what an earlier call finished is kept.

    Args:
        folder: where answers and features are kept.
        prompts: of each workload; ids distinct over all of them.
        target: the model.
        tap_ids: layers whose features are kept.
        max_new_tokens: longest answer.
        say: shows a line to the person who waits.
        slots: rows decoded side by side.

    Raises:
        ValueError: the folder holds answers made under other settings.
    """
    tokenizer = Tokenizer(target.vocabulary)
    asked = [prompt for group in prompts.values() for prompt in group]
    encoded = [
        Request(
            prompt.id,
            tuple(tokenizer.chat_prompt([{"role": "user", "content": prompt.turns[0]}])),
        )
        for prompt in asked
    ]
    longest = max(len(request.prompt) for request in encoded)
    settings = GenerationSettings(
        slots=slots,
        max_prompt_tokens=longest,
        max_new_tokens=max_new_tokens,
        loop_ngram=None,
        tap_ids=tuple(tap_ids),
    )
    recorded = {"target_sha256": target.sha256, "max_new_tokens": max_new_tokens}
    of_target = feature_settings(target.sha256, tap_ids, len(tap_ids) * target.cfg.hidden_size)
    path = folder / "answers.jsonl"
    with ResponseWriter(path, recorded) as writer:
        todo = [request for request in encoded if request.id not in writer.done]
        with FeatureWriter(folder / "features", of_target) as features:
            done = len(encoded) - len(todo)
            for responses in generate_into(
                writer, features, target.params, target.cfg, todo, tokenizer.stop_ids, settings
            ):
                done += len(responses)
                if responses:
                    say(f"answers: {done} of {len(encoded)}")
    by_id = {response.id: response for response in iter_responses(path)}
    examples = {
        name: make_examples(
            [by_id[prompt.id] for prompt in group], longest + max_new_tokens, loop_ngram=None
        )
        for name, group in prompts.items()
    }
    cache = FeatureCache(folder / "features", of_target)
    lost = {row.id for rows in examples.values() for row in cache.missing(rows)}
    if lost:
        raise ValueError(
            f"{folder}: the features of {len(lost)} answers were lost when an earlier run was "
            "killed; delete the folder and run again"
        )
    return Answered(examples, cache)


def replay_workloads(
    params: dict, frozen: FrozenTarget, answered: Answered, variant: Variant
) -> Iterator[ReplayedRow]:
    """Yields every answer as a drafter would have produced it.

    Args:
        params: drafter weights.
        frozen: the target's tables.
        answered: the answers.
        variant: block size, depth and taps.
    """
    for workload, examples in answered.examples.items():
        cycles: list[list[int]] = []
        for batch in evaluation_batches(examples, _BATCH_ROWS, features=answered.features):
            batch = trim_batch(batch, _LENGTH_MULTIPLE, at_least=_LENGTH_MULTIPLE)
            cycles += replay(params, frozen, batch, variant)
        for example, row in zip(examples, cycles, strict=True):
            answer = example.tokens[example.response_start :].tolist()
            free_cycles, free_tokens = walk_prefix(row, loop_start(answer))
            yield ReplayedRow(workload, example.id, sum(row), len(row), free_tokens, free_cycles)
