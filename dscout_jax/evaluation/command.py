"""How a measuring script ends when something is wrong: one line, no traceback."""

import contextlib
import sys
from collections.abc import Iterator

from dscout_jax.weights.download import WeightsError


@contextlib.contextmanager
def one_line_errors(program: str) -> Iterator[None]:
    """Ends the program with one line on what the user can mend, or on Ctrl-C.

    Args:
        program: begins the line.

    Raises:
        SystemExit: exit code 1 after an error, 130 after Ctrl-C.
    """
    try:
        yield
    except (ValueError, OSError, WeightsError) as error:
        sys.exit(f"{program}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.stderr.write(f"\n{program}: interrupted\n")
        sys.exit(130)
