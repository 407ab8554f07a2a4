"""Who imports whom: data <- passes | runtime <- face. Passes and runtime never meet; csrc knows no torch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest
import tree

# The face of the package; every other file directly in teraio/ is data.
FACE = (
    *(
        "backend",
        "unreached",
        "session",
        "earlier",
        "host_choice",
        "planning",
        "recording",
        "remade",
        "tiers",
        "voice",
        "cli",
        "commands",
        "demo",
        "demo_model",
    ),
    *("demo_model", "doctor", "report", "models", "estimating"),
    *("__init__", "__main__"),
)
BELOW = {
    "data": {"data"},
    "passes": {"passes", "data"},
    "runtime": {"runtime", "data"},
    "face": {"face", "passes", "runtime", "data"},
}
# What importing a data module may load besides Python's own library.
DATA_NEEDS = {"teraio", "networkx"}

INDUCTOR = "teraio.passes.inductor.codegen"


def layer(module: str) -> str:
    part = [*module.split("."), "__init__"][1]
    return part if part in ("passes", "runtime") else "face" if part in FACE else "data"


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


def test_every_module_imports_only_its_own_layer_and_those_below() -> None:
    wrong = [
        f"{module} ({layer(module)}) imports {name} ({layer(name)})"
        for module, path in MODULES.items()
        for name, _ in imports(path)
        if name.split(".")[0] == "teraio"
        and name != "teraio.__version__"
        and layer(name) not in BELOW[layer(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_data_layer_needs_no_torch() -> None:
    known = DATA_NEEDS | sys.stdlib_module_names
    wrong = [
        f"{module} imports {name}"
        for module, path in MODULES.items()
        if layer(module) == "data"
        for name, _ in imports(path)
        if name.split(".")[0] not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_modules_import_each_other_in_one_direction() -> None:
    def targets(module: str) -> set[str]:
        names = [name for name, at_import in imports(MODULES[module]) if at_import]
        found = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        return (found & MODULES.keys()) - {module}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module) :], module))
        if module not in done:
            for target in sorted(targets(module)):
                visit(target, (*trail, module))
            done.add(module)

    done: set[str] = set()
    for module in sorted(MODULES):
        visit(module, ())


def test_nobody_imports_the_folders_behind_the_links() -> None:
    """From the root of the tree `import passes` would work, and load every module of it a second time."""
    wrong = [
        f"{path} imports {name}; write teraio.{name}"
        for path in tree.files(".py")
        for name, _ in imports(path)
        if name.split(".")[0] in ("passes", "runtime")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_pass_over_its_lines_knows_inductor() -> None:
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
