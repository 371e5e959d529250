"""From a configuration to the parts that the training loop turns: data, tables, compiled steps."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dscout_jax.config.checks import require, to_dict
from dscout_jax.config.experiment import ExperimentConfig, ObjectiveConfig
from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.data.pipeline import evaluation_batches, pad_batch, training_batches
from dscout_jax.data.responses import Response
from dscout_jax.decoding.variant import Variant
from dscout_jax.models.drafter import init_drafter
from dscout_jax.models.target import round_matrices
from dscout_jax.objective.weighting import decay_length
from dscout_jax.training.initialization import check_same_shapes, drafter_of, init_from_target
from dscout_jax.training.inputs import Inputs, prepare_inputs, trim_batch
from dscout_jax.training.mesh import (
    held_rows,
    make_mesh,
    place_rows,
    place_whole,
    tree_layout,
    whole_layout,
)
from dscout_jax.training.parallel import (
    build_state,
    count_flops,
    make_eval_step,
    make_features_fn,
    make_train_step,
)
from dscout_jax.training.state import TrainState, init_state, make_optimizer, make_schedule
from dscout_jax.training.sums import Sums
from dscout_jax.training.validation import FrozenTarget, freeze
from dscout_jax.weights.dflash import load_drafter
from dscout_jax.weights.targets import LoadedTarget

_LENGTH_MULTIPLE = 64  # batches are cut to a multiple of so many positions: few programs, less work
_MEASURED_ROWS = 8  # rows on which the target's query and key sizes are measured
_CUT_BLOCK_SIZE = 8  # at which cuts in depth and taps are validated, or the next smaller one


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of one run.

    Attributes:
        config: the experiment.
        drafter: shapes of the drafter.
        target: the frozen target.
        inputs: rows, features, draft vocabulary.
        given: weights of the drafter that `drafter.init` names; None where it names none or the
            run is resumed.
        optimizer: of the drafter's weights.
        mesh: devices of the run.
        frozen: what the steps read of the target.
        frozen_here: the same, whole in this process, for validation.
        train_step: `(state, frozen, batch) -> (state, metrics)`; donates the state.
        step_flops: `(state, batch) -> operations` of one update but for the optimiser's.
        eval_sums: `(params, frozen, batch) -> (numerator, denominator, sums by horizon)`.
        features_fn: `(tokens, length) -> features` as training sees them.
        variants: what validation replays, by the suffix of its metrics.
    """

    config: ExperimentConfig
    drafter: DrafterConfig
    target: LoadedTarget
    inputs: Inputs
    given: dict | None
    optimizer: optax.GradientTransformation
    mesh: Mesh
    frozen: FrozenTarget
    frozen_here: FrozenTarget
    train_step: Callable
    step_flops: Callable
    eval_sums: Callable
    features_fn: Callable
    variants: dict[str, Variant]

    def identity(self) -> dict[str, Any]:
        """What must not change between a checkpoint and the run that continues it."""
        identity = to_dict(self.config)
        identity["target_sha256"] = self.target.sha256
        identity["data"]["fingerprint"] = self.inputs.fingerprint
        return identity

    @property
    def horizons(self) -> tuple[int, ...]:
        """Trained block sizes, in the order of the config."""
        return tuple(size for size, _ in self.config.objective.horizons)

    def init_state(self, params: dict, key: jax.Array) -> TrainState:
        """The state before the first update, around some weights."""
        ema = self.config.train.ema_decay is not None
        return init_state(params, self.optimizer, key, self.horizons, ema=ema)

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and layout of the train state; nothing is computed."""
        state = jax.eval_shape(
            lambda key: self.init_state(init_drafter(key, self.drafter), key), jax.random.key(0)
        )
        return jax.tree.map(
            lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
            state,
            self._layout(state),
        )

    def _layout(self, state: TrainState) -> Any:
        """Where the leaves of a state lie; whole on each device but in mode `jit`."""
        if self.config.train.mode == "jit":
            return tree_layout(state, self.mesh)
        return jax.tree.map(lambda _: whole_layout(self.mesh), state)

    def first_state(self) -> TrainState:
        """The state before the first update, as `drafter.init` says.

        Raises:
            ConfigError: the drafter has another shape than the target's layers.
        """
        init, seed = self.config.drafter.init, self.config.train.seed
        params_key, key = jax.random.split(jax.random.key(seed))
        if init == "random":
            arguments = (params_key, key)

            def make(params_key, key):
                return self.init_state(init_drafter(params_key, self.drafter), key)

        elif self.given is not None:
            arguments = (self.given, key)
            make = self.init_state
        else:
            training = self.inputs.training
            rows = pad_batch(training.examples[:_MEASURED_ROWS], training.max_length)
            arguments = (params_key, key, self.target.params, rows["tokens"], rows["length"])

            def make(params_key, key, params, tokens, length):
                weights = init_from_target(
                    params_key, self.drafter, params, self.target.cfg, tokens, length
                )
                return self.init_state(weights, key)

        layout = self._layout(jax.eval_shape(make, *arguments))
        if jax.process_count() > 1:
            arguments = place_whole(arguments, self.mesh)
        return build_state(make, *arguments, layout=layout)

    def training_iterator(self) -> Iterator[dict[str, np.ndarray]]:
        """Endless shuffled batches with `get_state` and `set_state`."""
        return training_batches(
            self.inputs.training,
            self.config.train.batch_size,
            self.config.data.seed,
            features=self.inputs.features,
            held=held_rows(self.mesh, self.config.train.batch_size),
        )

    def trim(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Cuts padding; at least as many positions as anchors remain."""
        return trim_batch(batch, _LENGTH_MULTIPLE, at_least=_most_anchors(self.config.objective))

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        """Returns a batch of training rows, trimmed, on the devices that will work on it."""
        return place_rows(self.trim(batch), self.mesh)

    def validation_batches(self) -> Iterator[dict[str, Any]]:
        """The validation rows once, with features."""
        for batch in evaluation_batches(
            self.inputs.validation, self.config.train.batch_size, features=self.inputs.features
        ):
            batch = self.trim(batch)
            if "features" not in batch:
                batch["features"] = self.features_fn(batch["tokens"], batch["length"])
            yield batch


def prepare(
    config: ExperimentConfig,
    target: LoadedTarget,
    responses: Sequence[Response],
    *,
    say: Callable[[str], None],
    stop: Callable[[], bool] = lambda: False,
    begins: bool = True,
) -> Setup:
    """Reads the data and builds the steps; nothing is compiled before its first call.

    Args:
        config: the experiment.
        target: the frozen target.
        responses: its greedy answers.
        say: shows a line to the person who waits.
        stop: asked while a feature cache is written.
        begins: whether the run starts from `drafter.init`; a resumed one does not read it.

    Raises:
        ValueError: configuration, data and target do not fit.
    """
    drafter = drafter_of(target.cfg, config.drafter)
    # What can be wrong is found before the hours that features may take.
    train = config.train
    mesh = make_mesh(train.mesh, train.batch_size // train.accumulate)
    require(
        train.batch_size % train.accumulate == 0,
        "train.accumulate",
        train.accumulate,
        f"a divisor of train.batch_size={train.batch_size}",
    )
    require(
        train.mode != "pmap" or jax.process_count() == 1,
        "train.mode",
        train.mode,
        f"'jit' or 'shard_map' in {jax.process_count()} processes",
    )
    for block_size, _ in config.objective.horizons:
        decay_length(config.objective, block_size)
    given = _given_weights(config.drafter.init, drafter, target.cfg) if begins else None
    run_params = target.params
    if config.data.target_dtype != "float32":
        run_params = round_matrices(target.params, jnp.dtype(config.data.target_dtype))
    features_fn = make_features_fn(
        run_params,
        target.cfg,
        drafter.target_layer_ids,
        jnp.dtype(config.data.feature_dtype),
    )
    inputs = prepare_inputs(
        config,
        target.cfg,
        target.sha256,
        responses,
        compute_features=features_fn,
        say=say,
        stop=stop,
    )

    sums = Sums(config, target.cfg, drafter)
    kept = sums.kept_weights(run_params, cached=inputs.features is not None)
    optimizer = make_optimizer(config.optimizer, config.train.num_steps)
    schedule = make_schedule(config.optimizer, config.train.num_steps)
    frozen_here = freeze(target.params, target.cfg, inputs.draft_vocab_ids, kept=kept)
    layout = tree_layout(frozen_here, mesh) if train.mode == "jit" else whole_layout(mesh)
    frozen = jax.device_put(frozen_here, layout)
    if jax.process_count() == 1:
        frozen_here = frozen
    return Setup(
        config=config,
        drafter=drafter,
        target=target,
        inputs=inputs,
        given=given,
        optimizer=optimizer,
        mesh=mesh,
        frozen=frozen,
        frozen_here=frozen_here,
        train_step=make_train_step(
            sums.training,
            optimizer,
            schedule,
            mode=train.mode,
            mesh=mesh,
            accumulate=train.accumulate,
            ema_decay=train.ema_decay,
            divide=config.objective.normalizer != "none",
        ),
        step_flops=lambda state, batch: count_flops(sums.whole_gradient, state, frozen, batch),
        eval_sums=make_eval_step(sums.held_out),
        features_fn=features_fn,
        variants=replayed_variants(config.objective, target.cfg, drafter),
    )


def replayed_variants(
    objective: ObjectiveConfig, target: TargetConfig, drafter: DrafterConfig
) -> dict[str, Variant]:
    """Returns what validation replays: every trained block size and, at one of them, every cut."""
    sizes = sorted(size for size, _ in objective.horizons)
    smaller = [Variant(target, drafter, size) for size in sizes[:-1]]
    size = max((size for size in sizes if size <= _CUT_BLOCK_SIZE), default=sizes[0])
    depths = [
        Variant(target, drafter, size, num_layers=depth)
        for depth, _ in objective.depths
        if depth < drafter.num_hidden_layers
    ]
    taps = [
        Variant(target, drafter, size, taps=taps)
        for taps, _ in objective.taps
        if len(taps) < len(drafter.target_layer_ids)
    ]
    named = {f"_{variant.name}": variant for variant in (*smaller, *depths, *taps)}
    return {"": Variant(target, drafter, sizes[-1])} | named


def _given_weights(init: str, drafter: DrafterConfig, target: TargetConfig) -> dict | None:
    """Returns the weights of the drafter folder that `drafter.init` names, if it names one.

    Raises:
        ConfigError, WeightsError: no drafter there, or one of another kind or shape.
    """
    if init in ("random", "target_layers"):
        return None
    given = load_drafter(init, target)
    for name in ("target_layer_ids", "mask_token_id"):
        wanted, found = getattr(drafter, name), getattr(given.config, name)
        require(wanted == found, f"drafter.{name}", wanted, f"{found}, as {init} was trained")
    wanted = jax.eval_shape(lambda key: init_drafter(key, drafter), jax.random.key(0))
    check_same_shapes(given.params, wanted)
    return given.params


def _most_anchors(objective: ObjectiveConfig) -> int:
    return max(num_anchors for _, num_anchors in objective.horizons)
