"""Tests of imports. A package is on a numbered floor, and imports only packages on lower floors.

Deferred imports and imports for types count, too.
"""

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

# The floors of the packages, the lowest floor first. Packages on one floor do not import each other.
FLOORS = (
    ("teraio._native", "teraio.errors", "teraio.units", "teraio.terminal"),
    ("teraio.progress", "teraio.text_table"),
    ("teraio.formats",),
    ("teraio.switches", "teraio.report"),
    ("teraio.options", "teraio.ranks"),
    # packages of compile time                                    packages of run time
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
    ("teraio.in_place", "teraio.models"),
    ("teraio.sharding", "teraio.estimating", "teraio.launch"),
    ("teraio.cli.commands", "teraio.integrations"),
    ("teraio.cli",),
    ("teraio", "teraio.__main__"),
)
FLOOR = {package: number for number, floor in enumerate(FLOORS) for package in floor}
# Packages that contain only other packages.
NO_CODE = {"teraio.passes", "teraio.runtime"}
# The packages of compile time and of run time share data only, and never import each other.
APART = ("teraio.passes", "teraio.runtime")
# Modules that only hold data. An import of them may load only DATA_NEEDS and Python's standard library.
DATA = (
    *("teraio.errors", "teraio.units", "teraio.text_table", "teraio.progress", "teraio.terminal"),
    *("teraio.formats", "teraio.switches", "teraio.options", "teraio.report"),
)
DATA_NEEDS = {"teraio", "networkx"}
INDUCTOR = "teraio.passes.inductor"


def package_of(path: Path) -> str:
    return tree.module_name(path if path.stem == "__init__" else path.with_name("__init__.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """List all imports of a file, as (absolute name, True for an import at the top level).

    Imports inside functions are included. `from a import b` counts as `a.b`, because b may be a module. If b
    is not a module, the floor of `a.b` is the floor of a.
    """
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
    """Return the smallest package in FLOORS that contains this module, or the module itself if FLOORS lists
    it."""
    name = module
    while name not in FLOOR:
        name = name.rpartition(".")[0]
    return name


def arrows() -> Iterator[tuple[str, str]]:
    """Yield (module, imported name) for each import of a teraio name in a module of teraio."""
    for module, path in MODULES.items():
        for name, _ in imports(path):
            ours = name.split(".")[0] == "teraio"
            if ours and module != "teraio" and name != "teraio.__version__" and name not in NO_CODE:
                yield module, name


def test_each_package_imports_only_those_on_lower_floors() -> None:
    """Check all imports.

    The package `teraio` itself imports nothing until user code accesses a public name.
    """
    assert not [name for name, at_import in imports(MODULES["teraio"]) if at_import and "teraio" in name]
    wrong = []
    for module, name in arrows():
        importer, imported = above(module), above(name)
        if importer != imported and name != "teraio" and FLOOR[importer] <= FLOOR[imported]:
            wrong.append(f"{module} (floor {FLOOR[importer]}) imports {name} (floor {FLOOR[imported]})")
        if {half for half in APART for one in (importer, imported) if one.startswith(half)} == set(APART):
            wrong.append(f"{module} imports {name}: compile time and run time share data only")
    assert not wrong, "\n".join(wrong)


def test_every_module_is_in_a_package_that_has_a_floor() -> None:
    """Check that each module belongs to a package, and that FLOORS lists each package."""
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


def test_modules_of_data_import_no_torch() -> None:
    known = DATA_NEEDS | sys.stdlib_module_names
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if module.startswith(DATA)
        for name, _ in imports(path)
        if name.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_the_linked_folders_directly() -> None:
    """Check that no file imports `passes` or `runtime` directly.

    In the root of the tree such an import works, but it loads the modules a second time.
    """
    wrong = [
        f"{path} imports {name}; write teraio.{name}"
        for path in tree.files(".py")
        for name, _ in imports(path)
        if name.split(".")[0] in ("passes", "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_one_package_imports_inductor() -> None:
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        for name, _ in imports(path)
        if name.startswith("torch._inductor") and not module.startswith(INDUCTOR)
    ]
    assert not wrong, "\n".join(wrong)


# The only imports of modules of teraio by a name in a string. `teraio` imports its public names on their
# first use. When a notebook shows a plan or a timeline, they load the code that draws them from a higher
# floor.
BY_NAME = {
    ("teraio", "teraio.{_MODULE_OF[name]}"),
    ("teraio.formats.notebook_view", "teraio.report.notebook"),
}


def test_only_listed_modules_import_others_by_name() -> None:
    """Check each call of `import_module`, because the test of floors cannot see such an import."""
    found = set()
    for module, path in MODULES.items():
        for node in ast.walk(tree.tree(path)):
            match node:
                case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module")):
                    name = ast.unparse(node.args[0]).removeprefix("f").strip("'\"")
                    found |= {(module, name)} if name.startswith("teraio") else set()
    assert found == BY_NAME


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("teraio", ("torch", "ortools", "kvikio", "networkx", "numpy", "rich", "tqdm")),
        ("teraio.passes.planner.planners", ("torch", "ortools", "kvikio")),
        ("teraio.cli.main", ("torch", "ortools", "kvikio", "rich", "tqdm")),
        (
            "teraio.backend",
            ("ortools", "kvikio", "networkx", "pandas", "transformers", "rich", "IPython", "teraio.report"),
        ),
    ],
)
def test_an_import_loads_no_more_than_it_needs(module: str, absent: tuple[str, ...]) -> None:
    """Check that an import loads only the modules that it needs.

    When torch lists its backends, it must not load teraio. Plans are made on machines without a GPU's
    libraries. `teraio plan` should not spend seconds on an import of torch.
    """
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
                f"{path} includes {header}: only the bindings may include Python"
            )
