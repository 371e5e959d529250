"""Writes `smollm2.npz`: what Hugging Face transformers computes with SmolLM2-135M-Instruct.

Transformers reads the same GGUF file with its own dequantisation, its own undoing of the q/k row
order and its own tokenizer conversion; nothing of ours takes part. Run by hand with torch and
transformers (written with torch 2.13, transformers 5.24, gguf 0.19, accelerate 1.15):

    python tests/golden/make_smollm2_golden.py \
        --gguf ~/.cache/dscout_jax/SmolLM2-135M-Instruct.Q4_1.gguf

Stored: for 256 positions of one text the logits of 16 columns, the best id, its margin over the
second best and the log of the sum of exponentials; for 20 chat prompts the prompt's ids and at most
64 greedy tokens (stop token included) with the margin of each choice. Everything in float32.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_POSITIONS = 256
NUM_COLUMNS = 16
NUM_NEW = 64
STOP_ID = 2

TEXT = (
    "The lighthouse at Carrow Point was built in 1873, after three ships broke on "
    "the same reef\n"
    "within 14 months. Its first keeper, a carpenter named Elias Holm, kept a diary "
    "in which every evening\n"
    'ends with the same four words: "Lamp lit, wind west." On 9 March 1881 the '
    "sentence is missing.\n"
    "\n"
    "What happened that night can be put together from other papers. The harbour "
    "master noted a pressure\n"
    "of 968 hPa at six o'clock, lower than anything he had seen; the fishing boats "
    "were called back, and 27\n"
    "of 31 came. Holm had gone down to the landing with a rope and a lantern. He "
    "pulled two people out of\n"
    "the water (a boy of eleven and his uncle), and carried the boy up 212 steps.\n"
    "\n"
    "def keepers(log):\n"
    "    years = {}\n"
    "    for entry in log:\n"
    "        years.setdefault(entry.year, []).append(entry.name)\n"
    "    return {year: sorted(set(names)) for year, names in years.items()}\n"
    "\n"
    "Today the light runs by itself: 60 watts, one flash every 7.5 seconds, visible "
    "for 19 nautical miles.\n"
    "If x is the height of the lamp in metres, the distance to the horizon is about "
    "3.57 * sqrt(x) km, so a\n"
    "lamp at 52 m is seen from almost 26 km away. Visitors are welcome from May to "
    "September; dogs are not."
)

PROMPTS = (
    "Explain to a ten year old why the sky turns red in the evening.",
    "A baker sells 14 loaves in the morning and 9 in the afternoon, at 3 dollars each. How much "
    "does she earn in 5 days?",
    "Write a Python function that returns the second largest number of a list.",
    "List five things to check before a long bicycle tour.",
    "Translate into French: The train leaves at seven.",
    "What is the difference between a virus and a bacterium?",
    "Solve for x: 3x + 7 = 2x - 5. Show each step.",
    "Write a short poem about a lost umbrella.",
    "Give me a recipe for a vegetable soup with exactly six ingredients.",
    "Complete this function:\n\ndef is_palindrome(text: str) -> bool:\n    ",
    "Who was Ada Lovelace? Answer in two sentences.",
    "Summarise in one sentence: Bees visit flowers to collect nectar. While they do so, pollen "
    "sticks to their bodies and is carried to the next flower, which lets plants make seeds.",
    "Write an email to my landlord about a dripping tap.",
    "What is the sum of the first 20 odd numbers?",
    "Name three rivers in South America and one fact about each.",
    "My plant has yellow leaves. What could be the reason?",
    "Write a SQL query that counts the orders of each customer.",
    "Is 91 a prime number? Explain.",
    "Invent a name for a café in a former railway station and say why it fits.",
    "Turn these words into one sentence: river, cold, early, jump.",
)


def load(gguf: Path):
    """Returns transformers' model and tokenizer of a GGUF file, float32, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


def margins(logits: torch.Tensor) -> torch.Tensor:
    """Returns the gap between the best two of [..., V] logits."""
    best = logits.topk(2, dim=-1).values
    return best[..., 0] - best[..., 1]


@torch.inference_mode()
def greedy(model, prompt: list[int]) -> tuple[list[int], list[float]]:
    """Returns at most NUM_NEW greedy tokens, one cached step each, and the margin of each."""
    tokens, gaps = [], []
    cache = None
    feed = torch.tensor([prompt])
    while len(tokens) < NUM_NEW and STOP_ID not in tokens[-1:]:
        output = model(feed, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits = output.logits[0, -1]
        tokens.append(int(logits.argmax()))
        gaps.append(float(margins(logits)))
        feed = torch.tensor([tokens[-1:]])
    return tokens, gaps


def main() -> None:
    """Runs transformers and writes the golden."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gguf", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("smollm2.npz"))
    args = parser.parse_args()
    if not args.gguf.is_file():
        parser.error(f"--gguf={args.gguf} is no file")
    model, tokenizer = load(args.gguf)

    text = tokenizer.encode(TEXT, add_special_tokens=False)[:NUM_POSITIONS]
    if len(text) != NUM_POSITIONS:
        parser.error(f"the text has {len(text)} tokens; {NUM_POSITIONS} are needed")
    with torch.inference_mode():
        logits = model(torch.tensor([text]), use_cache=False).logits[0]
    columns = np.linspace(3, logits.shape[1] - 1, NUM_COLUMNS).astype(np.int32)

    prompts = np.full((len(PROMPTS), NUM_NEW * 2), STOP_ID, np.int32)
    tokens = np.full((len(PROMPTS), NUM_NEW), STOP_ID, np.int32)
    gaps = np.full((len(PROMPTS), NUM_NEW), np.inf, np.float32)
    prompt_len, token_len = [], []
    for row, prompt in enumerate(PROMPTS):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        answer, answer_gaps = greedy(model, ids)
        prompts[row, : len(ids)] = ids
        tokens[row, : len(answer)] = answer
        gaps[row, : len(answer)] = answer_gaps
        prompt_len.append(len(ids))
        token_len.append(len(answer))
        print(f"{row:2d} {min(answer_gaps):.4f} {tokenizer.decode(answer)[:70]!r}")

    np.savez_compressed(
        args.out,
        text=np.array(text, np.int32),
        columns=columns,
        logits=logits[:, columns].numpy(),
        best_ids=logits.argmax(-1).numpy().astype(np.int32),
        best_margins=margins(logits).numpy(),
        log_sum_exp=logits.logsumexp(-1).numpy(),
        prompt_text=np.array(PROMPTS),
        prompts=prompts,
        prompt_len=np.array(prompt_len, np.int32),
        tokens=tokens,
        token_len=np.array(token_len, np.int32),
        token_margins=gaps,
    )
    print(f"{args.out}: {args.out.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
