# Environment for runs on this machine: `source launch/env.sh` before an experiment.
# Nothing here changes a result; the package itself never reads these variables.

# Compiled programs are kept between runs. Whoever can write there can run code: keep it private.
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/dscout_jax/compiled}"
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="${JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS:-0.5}"

# One process on a shared GPU: do not take all of its memory at start.
export XLA_PYTHON_CLIENT_PREALLOCATE="${XLA_PYTHON_CLIENT_PREALLOCATE:-false}"
