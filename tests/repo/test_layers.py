"""Packages on floors: each imports what stands below it, deferred imports and those of types included."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
import tree

# From the ground up. A line is a floor: its packages do not import each other.
FLOORS = (
    ("teraio._native", "teraio.errors", "teraio.units", "teraio.text_table"),
    ("teraio.progress",),
    ("teraio.formats",),
    ("teraio.switches",),
    ("teraio.options",),
    # compile time                                                run time
    ("teraio.passes.capture", "teraio.passes.synth", "teraio.runtime.torch_extension"),
    ("teraio.passes.slots", "teraio.passes.planner.problem", "teraio.runtime.device"),
    ("teraio.passes.fx", "teraio.passes.planner.simulate", "teraio.runtime.store"),
    ("teraio.passes.inductor", "teraio.passes.planner.bound", "teraio.runtime.ledger"),
    ("teraio.passes.selftest", "teraio.passes.planner.greedy", "teraio.runtime.step"),
    ("teraio.passes.planner.published", "teraio.passes.planner.search", "teraio.runtime.eager"),
    ("teraio.passes.planner.exact", "teraio.runtime.engine"),
    ("teraio.passes.planner", "teraio.runtime.optimizer", "teraio.runtime.patches"),
    ("teraio.runtime.model",),
    ("teraio.session",),
    ("teraio.backend",),
    ("teraio.models", "teraio.estimating"),
    ("teraio.cli.report",),
    ("teraio.cli.commands",),
    ("teraio.cli",),
    ("teraio", "teraio.__main__"),
)
FLOOR = {package: number for number, floor in enumerate(FLOORS) for package in floor}
# Nobody imports these for the name of what stands in them.
NO_CODE = {"teraio.passes", "teraio.runtime"}
# Compile time and run time know each other by data alone.
APART = ("teraio.passes", "teraio.runtime")
# What importing one of these may load besides Python's own library.
DATA = (
    *("teraio.errors", "teraio.units", "teraio.text_table", "teraio.progress"),
    *("teraio.formats", "teraio.switches", "teraio.options"),
)
DATA_NEEDS = {"teraio", "networkx"}
INDUCTOR = "teraio.passes.inductor"


def package_of(path: Path) -> str:
    return tree.module_name(path if path.stem == "__init__" else path.with_name("__init__.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """(absolute name, whether the import runs with the module itself) of all that a file imports, also inside
    functions. `from a import b` counts as `a.b`: b may be a module, and if not, a.b has the layer of a."""
    top = set(tree.tree(path).body)
    found = []
    for node in ast.walk(tree.tree(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = "." * node.level + (node.module or "")
            source = resolve_name(source, package_of(path)) if node.level else source
            names = [f"{source}.{alias.name}" for alias in node.names]
        found += [(name, node in top) for name in names]
    return found


MODULES = tree.package()


def above(module: str) -> str:
    """Return the package, or the file at the top, whose floor this module is on."""
    name = module
    while name not in FLOOR:
        name = name.rpartition(".")[0]
    return name


def arrows() -> Iterator[tuple[str, str]]:
    """Yield (module, name that it imports) for everything of this package that its modules import."""
    for module, path in MODULES.items():
        for name, _ in imports(path):
            ours = name.split(".")[0] == "teraio"
            if ours and module != "teraio" and name != "teraio.__version__" and name not in NO_CODE:
                yield module, name


def test_each_package_imports_only_those_on_lower_floors() -> None:
    """`teraio` itself imports nothing when it is loaded: it finds its public names when asked for them."""
    assert not [name for name, at_import in imports(MODULES["teraio"]) if at_import and "teraio" in name]
    wrong = []
    for module, name in arrows():
        here, there = above(module), above(name)
        if here != there and name != "teraio" and FLOOR[here] <= FLOOR[there]:
            wrong.append(f"{module} (floor {FLOOR[here]}) imports {name} (floor {FLOOR[there]})")
        if {half for half in APART for one in (here, there) if one.startswith(half)} == set(APART):
            wrong.append(f"{module} imports {name}: compile time and run time know each other by data alone")
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_package_that_has_a_floor() -> None:
    """Beside the packages there are no modules."""
    for module in MODULES:
        assert module in NO_CODE or above(module) != "teraio" or module == "teraio", f"{module} has no floor"


def test_modules_import_each_other_in_one_direction() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, name in arrows():
        graph[module].add(name if name in MODULES else name.rpartition(".")[0])
        graph[module] -= {module, "teraio", *NO_CODE}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def test_data_needs_no_torch() -> None:
    known = DATA_NEEDS | sys.stdlib_module_names
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith(DATA)
        for name, _ in imports(path)
        if name.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_nobody_imports_the_folders_behind_the_links() -> None:
    """From the root of the tree `import passes` would work, and load every module of it a second time."""
    wrong = [
        f"{path} imports {name}; write teraio.{name}"
        for path in tree.files(".py")
        for name, _ in imports(path)
        if name.split(".")[0] in ("passes", "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_one_package_knows_inductor() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name, _ in imports(path)
        if name.startswith("torch._inductor") and not module.startswith(INDUCTOR)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("teraio", ("torch", "ortools", "kvikio", "networkx", "numpy")),
        ("teraio.passes.planner.planners", ("torch", "ortools", "kvikio")),
        ("teraio.cli.main", ("torch", "ortools", "kvikio")),
        ("teraio.backend", ("ortools", "kvikio")),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, absent: tuple[str, ...]) -> None:
    """torch lists its backends without loading them, a plan is made on machines without a GPU's libraries,
    and `teraio plan` should not take the seconds that torch takes."""
    code = f"import sys, {module}; print(*[name for name in {absent!r} if name in sys.modules])"
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tree.ROOT, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
FOREIGN = re.compile(r"torch|aten|c10/|cuda|cufile|nvtx|hip/", re.IGNORECASE)
PYTHON = re.compile(r"nanobind|pybind11|Python\.h")


def test_the_native_code_includes_no_torch_and_no_cuda() -> None:
    sources = [path for path in tree.files(".cpp", ".h") if path.parts[0] == "csrc"]
    assert sources
    for path in sources:
        for header in INCLUDE.findall(tree.text(path)):
            own = (tree.ROOT / "csrc" / header).exists()
            assert own or not FOREIGN.search(header), f"{path} includes {header}"
            binding = path.name.startswith("bind")
            assert binding or not PYTHON.search(header), (
                f"{path} includes {header}: only the bindings know Python"
            )
