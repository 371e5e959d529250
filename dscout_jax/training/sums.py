"""The sums whose ratio is the loss of a run, as the compiled steps call them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dscout_jax.config.experiment import ExperimentConfig, ObjectiveConfig
from dscout_jax.config.models import DrafterConfig, TargetConfig
from dscout_jax.models.target import tail_params
from dscout_jax.objective.inclusion import row_keys
from dscout_jax.objective.loss import loss_sums, reads_target
from dscout_jax.training.parallel import final_hidden, tapped_features
from dscout_jax.training.state import TrainState
from dscout_jax.training.validation import FrozenTarget

_EVAL_SEED = 7  # of the anchors whose loss is validated: the same at every validation


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over rows, static choices bound.

    Attributes:
        config: the experiment.
        target: shapes of the target.
        drafter: shapes of the drafter.
    """

    config: ExperimentConfig
    target: TargetConfig
    drafter: DrafterConfig

    def kept_weights(self, params: dict, *, cached: bool) -> dict | None:
        """Returns the target's weights that a step runs (see `FrozenTarget`); None = none."""
        if not cached:
            return params
        if reads_target(self.config.objective):
            return tail_params(params, self.target, self.drafter.target_layer_ids[-1] + 1)
        return None

    def features(self, frozen: FrozenTarget, batch: dict[str, Any]) -> jax.Array:
        """Returns the target's features [B, S, C * D]: those of the batch, else computed."""
        if "features" in batch:
            return batch["features"]
        return tapped_features(
            frozen.params,
            self.target,
            batch["tokens"],
            self.drafter.target_layer_ids,
            jnp.dtype(self.config.data.feature_dtype),
        )

    def training(
        self,
        state: TrainState,
        params: dict,
        frozen: FrozenTarget,
        batch: dict[str, Any],
        keys: jax.Array,
        *,
        naive: bool = False,
    ) -> tuple:
        """Returns numerator, denominator and sums by horizon of a training batch.

        Args:
            state: read for the step and the running acceptances.
            params: drafter weights, the argument with a gradient.
            frozen: the target's part.
            batch: rows, with or without `features`.
            keys: [B] PRNG keys.
            naive: see `objective.loss.loss_sums`.
        """
        objective, train = self.config.objective, self.config.train
        features = self.features(frozen, batch)
        if reads_target(objective):
            deepest = self.drafter.target_layer_ids[-1]
            hidden = final_hidden(frozen.params, self.target, features, deepest)
            batch = batch | {"target_hidden": hidden}
        warmup = max(objective.weight_warmup * train.num_steps, 1.0)
        return loss_sums(
            params,
            frozen.tables,
            features,
            batch,
            keys,
            config=self.drafter,
            objective=objective,
            warmth=jnp.minimum((state.step + 1) / warmup, 1.0),
            acceptance=state.acceptance,
            dtype=jnp.dtype(train.compute_dtype),
            remat=train.remat,
            naive=naive,
        )

    def whole_gradient(self, state: TrainState, frozen: FrozenTarget, batch: dict[str, Any]):
        """Returns value and gradient without any loop, for counting operations."""
        keys = row_keys(state.key, 0, batch["tokens"].shape[0])

        def numerator(params):
            return self.training(state, params, frozen, batch, keys, naive=True)[0]

        return jax.value_and_grad(numerator)(state.params)

    def held_out(self, params: dict, frozen: FrozenTarget, batch: dict[str, Any]) -> tuple:
        """Returns the sums of DFlash's objective, whatever is trained, so that runs compare."""
        objective = self.config.objective
        plain = ObjectiveConfig(horizons=objective.horizons, gamma=objective.gamma)
        features = self.features(frozen, batch)
        keys = row_keys(jax.random.key(_EVAL_SEED), 0, features.shape[0])
        return loss_sums(
            params, frozen.tables, features, batch, keys, config=self.drafter, objective=plain
        )
