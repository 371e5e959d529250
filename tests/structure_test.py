"""The shape of the code: which room may import which, where jit lives, how long a module is.

Each rule is a function of a source tree that returns its violations as sentences, so that the rules
themselves are tested on small trees that break them.
"""

import ast
import pathlib
import subprocess
import sys
import textwrap

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "dscout_jax"

# A module imports only from rows with a smaller number, or from its own folder.
ROWS = {
    "config": 0,
    "files": 0,
    "kernels": 0,
    "models": 1,
    "objective": 2,
    "decoding": 2,
    "weights": 3,
    "data": 3,
    "training": 4,
    "throughput": 5,
    "evaluation": 5,
}
# The one look sideways: a tokenizer is built from the vocabulary that the weight file states.
SIDEWAYS = {("data", "weights")}
CORE_ROWS = (0, 1, 2)
CORE_IMPORTS = {"jax", "flax", "optax", "numpy", "chex", PACKAGE} | set(sys.stdlib_module_names)
JIT_ROOMS = ("decoding/", "training/parallel.py")
JIT_NAMES = {"jit", "pjit"}
DRAWER_NAMES = {"utils", "util", "common", "helpers", "misc"}
MAX_LINES = 400


def source_files(package: pathlib.Path) -> list[pathlib.Path]:
    return sorted(package.rglob("*.py"))


def parse(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: pathlib.Path, package: pathlib.Path) -> list[tuple[int, str]]:
    """Returns (line, dotted name) of every import, relative ones resolved, also inside functions.

    `from a import b` yields both `a` and `a.b`, because b may be a module.
    """
    here = [package.name, *path.relative_to(package).with_suffix("").parts]
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = here[: -node.level] if node.level else []
            base = ".".join([*origin, *([node.module] if node.module else [])])
            found.append((node.lineno, base))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def room_of(path: pathlib.Path, package: pathlib.Path) -> str:
    """Returns the folder (or top-level module) of the package that a file belongs to."""
    return path.relative_to(package).with_suffix("").parts[0]


def misplaced_imports(package: pathlib.Path) -> list[str]:
    """Finds imports that go down or sideways, and rooms that have no row."""
    problems = []
    for path in source_files(package):
        room = room_of(path, package)
        name = path.relative_to(package)
        if room == "__init__":
            problems += [
                f"{name}:{line} imports {module}; the package itself imports nothing"
                for line, module in imported_modules(path, package)
            ]
            continue
        if room not in ROWS:
            problems.append(f"{name} lies in {room}, which has no row")
            continue
        for line, module in imported_modules(path, package):
            parts = module.split(".")
            if parts[0] == "experiments":
                problems.append(f"{name}:{line} imports {module}; nothing imports experiments")
            if parts[0] != package.name or len(parts) == 1:
                continue
            other = parts[1]
            if other == room or (room, other) in SIDEWAYS:
                continue
            if ROWS.get(other, 99) >= ROWS[room]:
                problems.append(
                    f"{name}:{line} (row {ROWS[room]}) imports {module} (row {ROWS.get(other)})"
                )
    return problems


def heavy_core_imports(package: pathlib.Path) -> list[str]:
    """Finds imports in rows 0-2 beyond jax, flax, optax, numpy, chex and the standard library.

    kernels/ may import the compiler that it works without, and nothing else may.
    """
    return [
        f"{path.relative_to(package)}:{line} imports {module}"
        for path in source_files(package)
        if ROWS.get(room_of(path, package)) in CORE_ROWS
        for line, module in imported_modules(path, package)
        if module.split(".")[0] not in CORE_IMPORTS
        and not (room_of(path, package) == "kernels" and module.split(".")[0] == "llvmlite")
    ]


def linen_outside_models(package: pathlib.Path) -> list[str]:
    """Finds flax.linen outside models/."""
    return [
        f"{path.relative_to(package)}:{line} imports {module}"
        for path in source_files(package)
        if room_of(path, package) != "models"
        for line, module in imported_modules(path, package)
        if module.startswith("flax.linen")
    ]


def misplaced_jit(package: pathlib.Path) -> list[str]:
    """Finds jit and pjit outside the rooms that compile."""
    problems = []
    for path in source_files(package):
        name = path.relative_to(package)
        if name.as_posix().startswith(JIT_ROOMS):
            continue
        for node in ast.walk(parse(path)):
            used = isinstance(node, ast.Attribute) and node.attr in JIT_NAMES
            imported = isinstance(node, ast.ImportFrom) and any(
                alias.name in JIT_NAMES for alias in node.names
            )
            if used or imported:
                problems.append(f"{name}:{node.lineno} jits; that belongs to {JIT_ROOMS}")
    return problems


def long_modules(package: pathlib.Path) -> list[str]:
    """Finds modules above the line ceiling."""
    counts = {path: len(path.read_text().splitlines()) for path in source_files(package)}
    return [
        f"{path.name} has {n} lines, at most {MAX_LINES}"
        for path, n in counts.items()
        if n > MAX_LINES
    ]


def drawers(package: pathlib.Path) -> list[str]:
    """Finds modules and folders named after nothing in particular."""
    return [
        f"{path.relative_to(package)} is a drawer: name it after its subject"
        for path in source_files(package)
        if DRAWER_NAMES & set(path.relative_to(package).with_suffix("").parts)
    ]


def broad_excepts(package: pathlib.Path) -> list[str]:
    """Finds handlers that swallow everything; one that ends in `raise` only cleans up."""
    broad = {"Exception", "BaseException"}
    problems = []
    for path in source_files(package):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ExceptHandler):
                continue
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is None:
                continue
            caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or getattr(kind, "id", None) in broad for kind in caught):
                problems.append(f"{path.relative_to(package)}:{node.lineno} catches everything")
    return problems


def prints(package: pathlib.Path) -> list[str]:
    """Finds print calls in the library: it returns values or logs."""
    return [
        f"{path.relative_to(package)}:{node.lineno} prints"
        for path in source_files(package)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    ]


RULES = (
    misplaced_imports,
    heavy_core_imports,
    linen_outside_models,
    misplaced_jit,
    long_modules,
    drawers,
    broad_excepts,
    prints,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule):
    assert rule(REPOSITORY / PACKAGE) == []


@pytest.mark.parametrize("rule", (long_modules, drawers, broad_excepts), ids=lambda r: r.__name__)
def test_the_experiments_keep_the_rule(rule):
    assert rule(REPOSITORY / "experiments") == []


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (misplaced_imports, "models/target.py", "from dscout_jax.decoding import speculative"),
        (misplaced_imports, "objective/loss.py", "import dscout_jax.decoding.sampling"),
        (misplaced_imports, "weights/gguf.py", "def f():\n    from ..data import tokenizer"),
        (misplaced_imports, "data/prompts.py", "from dscout_jax import training"),
        (misplaced_imports, "evaluation/tables.py", "import experiments.quickstart"),
        (misplaced_imports, "drawer/thing.py", ""),
        (misplaced_imports, "__init__.py", "import jax"),
        (heavy_core_imports, "models/target.py", "import tensorflow_datasets"),
        (heavy_core_imports, "decoding/engine.py", "from absl import logging"),
        (heavy_core_imports, "config.py", "import ml_collections"),
        (heavy_core_imports, "models/layers.py", "from llvmlite import ir"),
        (heavy_core_imports, "kernels/native.py", "import tqdm"),
        (misplaced_imports, "kernels/product.py", "from dscout_jax.models import layers"),
        (linen_outside_models, "objective/loss.py", "from flax import linen as nn"),
        (linen_outside_models, "training/state.py", "import flax.linen"),
        (misplaced_jit, "models/target.py", "import jax\nf = jax.jit(lambda x: x)"),
        (misplaced_jit, "training/loop.py", "from jax import jit"),
        (misplaced_jit, "evaluation/x.py", "import jax\n@jax.jit\ndef f(x):\n    return x"),
        (long_modules, "config.py", "x = 1\n" * 401),
        (drawers, "data/utils.py", ""),
        (drawers, "common/masks.py", ""),
        (broad_excepts, "data/x.py", "try:\n    pass\nexcept Exception:\n    pass"),
        (broad_excepts, "data/x.py", "try:\n    pass\nexcept:\n    pass"),
        (broad_excepts, "data/x.py", "try:\n    pass\nexcept (OSError, Exception):\n    pass"),
        (prints, "training/loop.py", "print('step')"),
    ],
)
def test_each_rule_sees_the_tree_that_breaks_it(tmp_path, rule, path, source):
    file = tmp_path / PACKAGE / path
    file.parent.mkdir(parents=True)
    file.write_text(source)
    assert rule(tmp_path / PACKAGE)


def test_a_tidy_tree_breaks_no_rule(tmp_path):
    sources = {
        "__init__.py": '"""Package."""',
        "config/models.py": "import dataclasses",
        "models/target.py": "from flax import linen\nfrom dscout_jax.config.models import Shape",
        "decoding/speculative.py": "import jax\nfrom dscout_jax.models import target\nf = jax.jit",
        "training/parallel.py": "import jax\nf = jax.jit",
        "data/prompts.py": "from . import loops\ntry:\n    pass\nexcept OSError:\n    pass",
        "data/tokenizer.py": "from dscout_jax.weights import gguf",
        "data/store.py": "try:\n    pass\nexcept BaseException:\n    raise",
    }
    for path, source in sources.items():
        file = tmp_path / PACKAGE / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    assert [problem for rule in RULES for problem in rule(tmp_path / PACKAGE)] == []


def test_no_tensorflow_and_no_torch_after_importing_every_module():
    names = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in source_files(REPOSITORY / PACKAGE)
    ]
    script = textwrap.dedent(f"""
        import importlib, sys
        for name in {names}:
            importlib.import_module(name)
        print(sorted({{"tensorflow", "torch", "jax.experimental.jax2tf"}} & set(sys.modules)))
    """)
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip().splitlines()[-1] == "[]"


def test_importing_the_package_alone_loads_nothing_heavy():
    script = f"import sys, {PACKAGE}; print('jax' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
