"""Writes `dflash_tiny.npz`: what z-lab/dflash computes for a tiny target and a tiny drafter.

The golden lets `tests/models/dflash_parity_test.py` compare our target, drafter and decode loop
with an independent implementation where neither torch nor that one is installed. Run by hand:

    git clone https://github.com/z-lab/dflash /tmp/dflash
    python tests/golden/make_dflash_golden.py --dflash_dir /tmp/dflash

It needs torch and transformers (written with torch 2.13, transformers 5.24; commit 44947fb of the
reference). Both models are trained for a few seconds on a toy language, because a random drafter is
never accepted: here the accepted lengths vary between 1 and the block size. Weights are rounded to
bfloat16 values (stored as float32, so that the file compresses), then everything is recorded in
float32 with eager attention. Prompts whose decisions come closer than `--margin` are passed over.
"""

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

TARGET = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}
DRAFTER = {
    **{k: v for k, v in TARGET.items() if k not in ("tie_word_embeddings",)},
    "num_hidden_layers": 2,
    "num_target_layers": 6,
    "target_layer_ids": [1, 2, 4],
    "mask_token_id": 96,
    "block_size": 8,
}
PROMPT_LENGTHS = (5, 9, 14)
NUM_SYMBOLS = 24
NUM_NEW = 28


def make_target(seed: int) -> Qwen3ForCausalLM:
    """Returns a random Qwen3 with norm scales away from one."""
    torch.manual_seed(seed)
    fields = {k: v for k, v in TARGET.items() if k != "rope_theta"}
    config = Qwen3Config(
        **fields,
        rope_parameters={"rope_type": "default", "rope_theta": TARGET["rope_theta"]},
        initializer_range=0.15,
        use_cache=True,
        attn_implementation="eager",
    )
    return scatter_norms(Qwen3ForCausalLM(config).float().eval())


def make_drafter(module, seed: int):
    """Returns the reference's drafter, random, for the target of `make_target`."""
    torch.manual_seed(seed)
    own = ("rope_theta", "target_layer_ids", "mask_token_id")
    config = Qwen3Config(
        **{k: v for k, v in DRAFTER.items() if k not in own},
        rope_parameters={"rope_type": "default", "rope_theta": DRAFTER["rope_theta"]},
        dflash_config={k: DRAFTER[k] for k in ("target_layer_ids", "mask_token_id")},
        initializer_range=0.15,
        attn_implementation="eager",
    )
    return scatter_norms(module.DFlashDraftModel(config).float().eval())


def scatter_norms(model: nn.Module) -> nn.Module:
    """Moves every norm scale away from one, so that a forgotten scale shows."""
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.25 * torch.randn_like(value))
    return model


def round_weights(model: nn.Module) -> None:
    """Rounds each weight to the nearest bfloat16 value, kept as float32."""
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.bfloat16().float())


def toy_sequences(num: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Returns [num, length] ids of a language whose next symbol depends on the last two."""
    tokens = torch.randint(NUM_SYMBOLS, (num, length), generator=generator)
    noise = torch.rand((num, length), generator=generator) < 0.05
    for t in range(2, length):
        before, last = tokens[:, t - 2], tokens[:, t - 1]
        follow = torch.where(before % 3 == 0, (5 * last + 7) % NUM_SYMBOLS, (last + 11) % 23)
        tokens[:, t] = torch.where(noise[:, t], tokens[:, t], follow)
    return tokens


def train_target(model: Qwen3ForCausalLM, steps: int, generator: torch.Generator) -> float:
    """Trains the target on the toy language and returns the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        tokens = toy_sequences(32, 32, generator)
        logits = model(tokens, use_cache=False).logits[:, 1:-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def greedy_rollouts(model: Qwen3ForCausalLM, generator: torch.Generator, num: int, length: int):
    """Returns [num, length] ids the target itself continues from toy prompts, and its features."""
    tokens = toy_sequences(num, 8, generator)
    while tokens.shape[1] < length:
        following = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], dim=1)
    states = model(tokens, use_cache=False, output_hidden_states=True).hidden_states
    return tokens, torch.cat([states[i + 1] for i in DRAFTER["target_layer_ids"]], dim=-1)


def train_drafter(drafter, target, steps: int, generator: torch.Generator) -> float:
    """Trains the drafter on the target's own continuations and returns the last loss."""
    tokens, features = greedy_rollouts(target, generator, 256, 48)
    for value in target.parameters():
        value.requires_grad_(False)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=3e-3)
    for step in range(steps):
        block = (4, 8)[step % 2]
        anchor = int(torch.randint(5, 48 - block, (), generator=generator))
        rows = torch.randint(256, (48,), generator=generator)
        block_ids = torch.full((48, block), DRAFTER["mask_token_id"])
        block_ids[:, 0] = tokens[rows, anchor]
        hidden = drafter(
            target_hidden=features[rows, :anchor],
            noise_embedding=target.model.embed_tokens(block_ids),
            position_ids=torch.arange(anchor + block).expand(48, -1),
            is_causal=False,
        )
        logits = target.lm_head(hidden[:, 1:])
        labels = tokens[rows, anchor + 1 : anchor + block]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


class CutCache(DynamicCache):
    """A cache that is cut to a length, as the reference asks; transformers 5 only removes."""

    def crop(self, max_length: int) -> None:
        """Drops the positions at and after `max_length`."""
        surplus = self.get_seq_length() - max_length
        if surplus > 0:
            super().crop(-surplus)


class Recorder:
    """Keeps what the reference's loop gives to, and gets from, both models."""

    def __init__(self, target: nn.Module, drafter: nn.Module):
        self.cycles: list[dict] = []
        self.target_logits: list[torch.Tensor] = []
        self.target = target
        self.handles = [
            drafter.register_forward_hook(self.keep_draft, with_kwargs=True),
            target.register_forward_hook(self.keep_target, with_kwargs=True),
        ]

    def keep_draft(self, module, args, kwargs, output):
        """Forward hook of the drafter."""
        self.cycles.append(
            {
                "features": kwargs["target_hidden"][0].clone(),
                "positions": kwargs["position_ids"][0].clone(),
                "hidden": output[0].clone(),
                "draft_logits": self.target.lm_head(output[0]).clone(),
            }
        )

    def keep_target(self, module, args, kwargs, output):
        """Forward hook of the target."""
        self.target_logits.append(output.logits[0].clone())

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self.handles:
            handle.remove()


def top_two_margin(logits: torch.Tensor) -> float:
    """Returns the smallest gap between the best two of each row of [T, V] logits."""
    best = logits.topk(2, dim=-1).values
    return (best[:, 0] - best[:, 1]).min().item()


def decisive_margin(recorder: Recorder, lengths: list[int]) -> float:
    """Returns the smallest gap among the decisions that shape the run's tokens and lengths."""
    margins = [top_two_margin(recorder.target_logits[0][-1:])]
    for cycle, logits, length in zip(
        recorder.cycles, recorder.target_logits[1:], lengths, strict=True
    ):
        margins.append(top_two_margin(logits[:length]))
        margins.append(top_two_margin(cycle["draft_logits"][1 : length + 1]))
    return min(margins)


def record_run(module, target, drafter, prompt: torch.Tensor, block: int, stop_ids):
    """Returns the reference's result on one prompt and the recorder that watched it."""
    recorder = Recorder(target, drafter)
    result = module.dflash_generate(
        drafter,
        target=target,
        input_ids=prompt[None],
        max_new_tokens=NUM_NEW,
        stop_token_ids=stop_ids,
        temperature=0.0,
        block_size=block,
        return_stats=True,
    )
    recorder.close()
    return result, recorder


def stops_inside_a_cycle(prompt_len: int, result) -> list[int]:
    """Returns ids that first appear among a cycle's accepted drafts, in order of appearance."""
    output = result.output_ids[0, prompt_len:].tolist()
    last_of_cycle = set(np.cumsum([0, *result.acceptance_lengths]).tolist())
    return [
        token
        for i, token in enumerate(output)
        if token not in output[:i] and i not in last_of_cycle
    ]


def find_prompt(module, target, drafter, length: int, margin: float, generator):
    """Returns a prompt whose runs, by block size, have varied lengths and no near tie."""
    for _ in range(200):
        prompt = toy_sequences(1, length, generator)[0]
        runs = {b: record_run(module, target, drafter, prompt, b, None) for b in (4, 8)}
        found = min(decisive_margin(rec, res.acceptance_lengths) for res, rec in runs.values())
        varied = len(set(runs[8][0].acceptance_lengths)) >= 4
        if found >= margin and varied and stops_inside_a_cycle(length, runs[8][0]):
            return prompt, runs, found
    raise RuntimeError(f"no prompt of {length} tokens has margins above {margin}; change --seed")


def store_run(arrays: dict, name: str, prompt, block, stop_ids, result, recorder, full: bool):
    """Adds one run to `arrays` under `name/...`; `full` adds hidden states and features."""
    arrays[f"{name}/prompt"] = prompt.numpy().astype(np.int32)
    arrays[f"{name}/block_size"] = np.int32(block)
    arrays[f"{name}/max_new_tokens"] = np.int32(NUM_NEW)
    arrays[f"{name}/stop_ids"] = np.array(stop_ids or [], np.int32)
    output = result.output_ids[0, len(prompt) :]
    arrays[f"{name}/output"] = output.numpy().astype(np.int32)
    arrays[f"{name}/lengths"] = np.array(result.acceptance_lengths, np.int32)
    if not full:
        return
    cycles = recorder.cycles
    arrays[f"{name}/features"] = torch.cat([c["features"] for c in cycles]).numpy()
    arrays[f"{name}/num_features"] = np.array([len(c["features"]) for c in cycles], np.int32)
    arrays[f"{name}/anchors"] = np.array([int(c["positions"][-block]) for c in cycles], np.int32)
    arrays[f"{name}/hidden"] = torch.stack([c["hidden"] for c in cycles]).numpy()


@torch.no_grad()
def store_target(arrays: dict, name: str, target, prompt: torch.Tensor) -> None:
    """Adds the target's uncached view of a prompt: all logits and the tapped residual streams."""
    output = target(prompt[None], use_cache=False, output_hidden_states=True)
    arrays[f"{name}/tokens"] = prompt.numpy().astype(np.int32)
    arrays[f"{name}/logits"] = output.logits[0].numpy()
    taps = [output.hidden_states[i + 1][0] for i in DRAFTER["target_layer_ids"]]
    arrays[f"{name}/taps"] = torch.cat(taps, dim=-1).numpy()
    arrays[f"{name}/final"] = output.hidden_states[-1][0].numpy()


def main() -> None:
    """Trains the two tiny models, runs the reference on them and writes the golden."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dflash_dir", type=Path, required=True, help="checkout of z-lab/dflash")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("dflash_tiny.npz"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target_steps", type=int, default=300)
    parser.add_argument("--drafter_steps", type=int, default=80)
    parser.add_argument("--margin", type=float, default=0.02, help="smallest gap of logits allowed")
    args = parser.parse_args()
    if not (args.dflash_dir / "dflash" / "model.py").is_file():
        parser.error(f"--dflash_dir={args.dflash_dir} holds no dflash/model.py")
    sys.path.insert(0, str(args.dflash_dir))
    module = importlib.import_module("dflash.model")
    module._cuda_time = time.perf_counter  # the reference's clock asks for a GPU
    module.DynamicCache = CutCache

    torch.set_num_threads(1)  # the models are tiny
    generator = torch.Generator().manual_seed(args.seed)
    target = make_target(args.seed)
    print(f"target loss {train_target(target, args.target_steps, generator):.3f}")
    round_weights(target)
    drafter = make_drafter(module, args.seed + 1)
    print(f"drafter loss {train_drafter(drafter, target, args.drafter_steps, generator):.3f}")
    round_weights(drafter)

    arrays: dict[str, np.ndarray] = {
        "target_config": np.array(json.dumps(TARGET)),
        "drafter_config": np.array(json.dumps(DRAFTER)),
        "versions": np.array(
            json.dumps({"torch": torch.__version__, "transformers": transformers.__version__})
        ),
    }
    for prefix, model in (("target", target), ("drafter", drafter)):
        for name, value in model.state_dict().items():
            arrays[f"{prefix}_weights/{name}"] = value.numpy()

    for index, length in enumerate(PROMPT_LENGTHS):
        prompt, runs, margin = find_prompt(module, target, drafter, length, args.margin, generator)
        store_target(arrays, f"target_{index}", target, prompt)
        for block, (result, recorder) in runs.items():
            full = (index, block) in ((0, 4), (1, 8))
            name = f"run_{index}_block{block}"
            store_run(arrays, name, prompt, block, None, result, recorder, full)
            print(name, "lengths", result.acceptance_lengths, f"margin {margin:.3f}")
        stop_id = stops_inside_a_cycle(length, runs[8][0])[-1]
        result, recorder = record_run(module, target, drafter, prompt, 8, [stop_id])
        name = f"run_{index}_stop"
        store_run(arrays, name, prompt, 8, [stop_id], result, recorder, False)
        print(name, "stop id", stop_id, "lengths", result.acceptance_lengths)

    np.savez_compressed(args.out, **arrays)
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB, {len(arrays)} arrays")


if __name__ == "__main__":
    main()
