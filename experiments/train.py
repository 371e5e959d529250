r"""Trains a drafter as a config file says.

    python experiments/train.py --config=experiments/configs/smollm2_dflash.py --workdir=runs/dflash

Everything goes into the workdir: config.json, run.json (versions, machine, git revision),
metrics.jsonl, tensorboard/, checkpoints/, curves.png and at the end drafter/, which
experiments/evaluate.py and quickstart.py load. SIGTERM and Ctrl-C save and end the run; the same
command continues it exactly where it was.

On a cluster that JAX knows (Slurm, TPU pod, GKE, Open MPI) start the command once a process with
`--distributed`; elsewhere name `--coordinator`, `--num_processes` and `--process_id` too, as
`launch/local.py` does. All processes read and write the same workdir, store and feature cache.
"""

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax
from absl import app, flags, logging
from ml_collections import config_flags

from dscout_jax.config.experiment import ExperimentConfig, from_config_dict
from dscout_jax.evaluation.plots import training_curves
from dscout_jax.files import require_writable
from dscout_jax.training.inputs import load_responses
from dscout_jax.training.interrupt import StopRequest
from dscout_jax.training.loop import TrainingError, TrainResult, train
from dscout_jax.training.metrics import read_jsonl
from dscout_jax.training.processes import SharedStop, is_first, join
from dscout_jax.weights.download import WeightsError
from dscout_jax.weights.targets import load_target

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment, FILE.py or FILE.py:variant.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run; made where missing.")
_DISTRIBUTED = flags.DEFINE_bool("distributed", False, "This is one of several processes.")
_COORDINATOR = flags.DEFINE_string(
    "coordinator", None, "host:port of process 0; by default JAX asks the cluster."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "How many there are.", lower_bound=1)
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Of this one, from 0.", lower_bound=0)


def parse_flags(arguments: Sequence[str]) -> list[str]:
    """Parses the command line; a typo ends the program with one line."""
    try:
        rest = flags.FLAGS(arguments)
        for name, flag in (("config", _CONFIG), ("workdir", _WORKDIR)):
            if flag.value is None:
                raise ValueError(f"--{name} is missing: {flags.FLAGS[name].help}")
    except (flags.Error, AttributeError, KeyError, ValueError, TypeError, OSError) as error:
        # The libraries wrap tracebacks and escaped line ends around what matters, the last line.
        text = str(error).replace("\\n", "\n").strip(" \n'\"").splitlines()[-1]
        fail(text if " " in text else f"the config has no field {text!r}")
    return rest


def fail(text: str) -> NoReturn:
    """Ends the program with one line and exit code 1."""
    sys.exit(f"train: {' '.join(text.split())}")


def run(config: ExperimentConfig, workdir: str) -> TrainResult:
    """Trains; draws the curves whatever the end was."""
    directory = require_writable(workdir)
    responses = load_responses(config.data.store)
    target = load_target(config.target)
    try:
        with SharedStop() if jax.process_count() > 1 else StopRequest() as stop:
            return train(config, directory, target, responses, stop=stop)
    finally:
        metrics = directory / "metrics.jsonl"
        if is_first() and metrics.exists():
            training_curves(read_jsonl(metrics), directory / "curves.png")


def main(_: Sequence[str]) -> None:
    """Runs the experiment; what the user can mend ends it with one line."""
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells every step of every save at INFO
    try:
        if _DISTRIBUTED.value:
            join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
        result = run(from_config_dict(_CONFIG.value.to_dict()), _WORKDIR.value)
    except (ValueError, OSError, WeightsError, TrainingError) as error:
        fail(str(error))
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        # The others wait no longer for this one, nor this one at exit for them.
        print(
            f"train: process {jax.process_index()} cannot go on: {str(error).splitlines()[0]}; if "
            "another process ended, the same command continues from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    except KeyboardInterrupt:  # before the loop, which asks `stop`, or at a second Ctrl-C
        print("\ntrain: interrupted; the same command continues", file=sys.stderr)
        sys.exit(130)
    if not result.finished and is_first():
        print(f"stopped after step {result.step}, saved; the same command continues")


if __name__ == "__main__":
    jax.config.parse_flags_with_absl()
    app.run(main, flags_parser=parse_flags)
