"""Times PyTorch with SmolLM2: z-lab's speculative cycle and transformers' plain decoding.

A stand-alone script for another Python environment (torch, transformers, gguf, accelerate), so that
`experiments/bench_decode.py` can run both sides on the same machine without torch ever becoming a
dependency. It imports nothing of this project. By hand:

    git clone https://github.com/z-lab/dflash /tmp/dflash
    python experiments/bench_torch.py --dflash_dir /tmp/dflash \
        --gguf ~/.cache/dscout_jax/SmolLM2-135M-Instruct.Q4_1.gguf --json torch.json

A cycle is the time from one call of the drafter to the next, taken inside the reference's own
`dflash_generate` (batch 1, float32). The drafter has random weights, so each cycle emits about one
token; its cost does not depend on what is accepted. Plain decoding is measured twice: by
`model.generate` and by a bare loop over the cached forward, which has less overhead. Other work on
the machine falsifies the figures, so the load average is written beside them.
"""

import argparse
import importlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config

WARMUP_CYCLES = 3


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="the target's GGUF file")
    parser.add_argument("--dflash_dir", type=Path, help="checkout of z-lab/dflash; absent = skip")
    parser.add_argument("--block_sizes", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--num_layers", type=int, default=3, help="drafter layers")
    parser.add_argument("--target_layer_ids", type=int, nargs="+", default=[1, 8, 14, 21, 27])
    parser.add_argument("--context", type=int, default=300, help="prompt length in tokens")
    parser.add_argument("--cycles", type=int, default=24, help="timed cycles per repeat")
    parser.add_argument("--new_tokens", type=int, default=32, help="plain tokens per repeat")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="where the result is written; absent = stdout")
    return parser


class CutCache(DynamicCache):
    """A cache that is cut to a length, as the reference asks; transformers 5 only removes."""

    def crop(self, max_length: int) -> None:
        """Drops the positions at and after `max_length`."""
        surplus = self.get_seq_length() - max_length
        if surplus > 0:
            super().crop(-surplus)


def load_reference(dflash_dir: Path):
    """Returns z-lab's module, its clock replaced by one that needs no GPU."""
    sys.path.insert(0, str(dflash_dir))
    module = importlib.import_module("dflash.model")
    module._cuda_time = time.perf_counter
    module.DynamicCache = CutCache
    return module


def make_drafter(module, target: nn.Module, num_layers: int, layer_ids: list[int]) -> nn.Module:
    """Returns the reference's drafter with random weights and the target's layer shapes."""
    shape = target.config
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        num_target_layers=shape.num_hidden_layers,
        dflash_config={"target_layer_ids": layer_ids, "mask_token_id": 0},
        block_size=16,
        attn_implementation="sdpa",
    )
    return module.DFlashDraftModel(config).float().eval()


def time_cycles(module, drafter, target, prompt: torch.Tensor, block_size: int, cycles: int):
    """Returns milliseconds of `cycles` speculative cycles, after a few for warming up."""
    starts: list[float] = []
    handle = drafter.register_forward_pre_hook(lambda *_: starts.append(time.perf_counter()))
    wanted = WARMUP_CYCLES + cycles + 1
    new_tokens = wanted
    while len(starts) < wanted:  # an accepted draft makes a run shorter
        starts.clear()
        module.dflash_generate(
            drafter,
            target=target,
            input_ids=prompt,
            max_new_tokens=new_tokens,
            stop_token_ids=None,
            temperature=0.0,
            block_size=block_size,
        )
        new_tokens *= 2
    handle.remove()
    starts = starts[WARMUP_CYCLES : WARMUP_CYCLES + cycles + 1]
    return [1e3 * (b - a) for a, b in zip(starts, starts[1:], strict=False)]


def time_generate(target: nn.Module, prompt: torch.Tensor, new_tokens: int) -> dict[str, float]:
    """Returns seconds of `model.generate` for one token and for `new_tokens` more, greedy."""
    seconds = []
    for count in (1, 1 + new_tokens):
        start = time.perf_counter()
        output = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
        )
        seconds.append(time.perf_counter() - start)
        if output.shape[1] != prompt.shape[1] + count:
            raise RuntimeError(
                f"generate stopped early: {output.shape[1] - prompt.shape[1]} tokens"
            )
    return {"prefill_s": seconds[0], "decode_s": seconds[1] - seconds[0]}


@torch.inference_mode()
def time_loop(target: nn.Module, prompt: torch.Tensor, new_tokens: int) -> list[float]:
    """Returns milliseconds of each of `new_tokens` cached greedy steps."""
    cache, feed, samples = DynamicCache(), prompt, []
    for _ in range(new_tokens + 1):
        start = time.perf_counter()
        logits = target(feed, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        feed = logits[:, -1].argmax(-1, keepdim=True)
        feed.item()
        samples.append(1e3 * (time.perf_counter() - start))
    return samples[1:]


def measure(args: argparse.Namespace) -> dict:
    """Returns settings, versions, one row per measurement and repeat, and their medians."""
    load_before = os.getloadavg()[0]
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(
        args.gguf.parent, gguf_file=args.gguf.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    target.generation_config.eos_token_id = None
    prompt = torch.randint(3, target.config.vocab_size, (1, args.context))
    module = drafter = None
    if args.dflash_dir is not None:
        module = load_reference(args.dflash_dir)
        drafter = make_drafter(module, target, args.num_layers, args.target_layer_ids)

    time_loop(target, prompt, 2)
    rows = []
    for repeat in range(args.repeats):
        for block_size in args.block_sizes if module is not None else []:
            samples = time_cycles(module, drafter, target, prompt, block_size, args.cycles)
            rows.append(
                {
                    "name": f"zlab_cycle_block{block_size}_ms",
                    "repeat": repeat,
                    "median": statistics.median(samples),
                    "samples": samples,
                }
            )
        samples = time_loop(target, prompt, args.new_tokens)
        speed = 1e3 / statistics.median(samples)
        rows.append(
            {
                "name": "hf_loop_tokens_per_s",
                "repeat": repeat,
                "median": speed,
                "samples": [1e3 / sample for sample in samples],
            }
        )
        seconds = time_generate(target, prompt, args.new_tokens)
        speed = args.new_tokens / seconds["decode_s"]
        rows.append(
            {
                "name": "hf_generate_tokens_per_s",
                "repeat": repeat,
                "median": speed,
                "samples": [speed],
                **seconds,
            }
        )
    names = list(dict.fromkeys(row["name"] for row in rows))
    return {
        "settings": {key: _plain(value) for key, value in vars(args).items()},
        "load_average": {"before": load_before, "after": os.getloadavg()[0]},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "summary": {
            name: statistics.median(row["median"] for row in rows if row["name"] == name)
            for name in names
        },
        "rows": rows,
    }


def _plain(value):
    return value.name if isinstance(value, Path) else value  # no paths of one machine


def main() -> None:
    """Measures and writes JSON."""
    parser = build_parser()
    args = parser.parse_args()
    if not args.gguf.is_file():
        parser.error(f"--gguf={args.gguf} is no file")
    if args.dflash_dir is not None and not (args.dflash_dir / "dflash" / "model.py").is_file():
        parser.error(f"--dflash_dir={args.dflash_dir} holds no dflash/model.py")
    text = json.dumps(measure(args), indent=1)
    if args.json is None:
        print(text)
    else:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
