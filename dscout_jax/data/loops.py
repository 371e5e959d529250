"""Verbatim loops in generated text.

A small model at temperature 0 often ends in a loop, which any drafter predicts. Training rows are
therefore cut where the loop starts, and accepted lengths are also reported up to there only.
"""

from collections.abc import Sequence

LOOP_NGRAM = 16


def loop_start(ids: Sequence[int], n: int = LOOP_NGRAM) -> int:
    """Returns where the first repeated n-gram starts for the second time.

    The smallest i such that `ids[i:i+n]` also starts at some j < i (the two may overlap), and
    `len(ids)` where no n-gram occurs twice. `ids[:loop_start(ids)]` is the loop-free part.

    Example: with n=2, `loop_start([5, 6, 7, 5, 6, 8], n=2)` is 3.

    Args:
        ids: token ids of a response, the prompt not included.
        n: length of the n-gram, at least 1.

    Raises:
        ValueError: n is below 1.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    ids = tuple(ids)
    seen = set()
    for start in range(len(ids) - n + 1):
        gram = ids[start : start + n]
        if gram in seen:
            return start
        seen.add(gram)
    return len(ids)
