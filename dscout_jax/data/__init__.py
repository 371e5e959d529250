"""Text and tokens: tokenizer, prompts, the target's answers, training batches, features."""
