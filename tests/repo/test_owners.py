"""Tests that each file assigns only attributes of its own classes. Other objects change only by their
methods.

A file's own attributes are those that its classes declare in `__slots__`, in the class body, or by `self.name
= ...`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tree

# Allowed assignments: to objects of libraries that have no method for this purpose, and to functions that the
# same file makes.
PARAMETERS = "solver.parameters"  # a message object of ortools
ANYWHERE = {"parser.description", "parser.epilog"}  # of argparse
ALLOWED = {
    "passes/capture/recompute_cut.py": {"backward.meta", "forward.meta", "node.meta"},
    "passes/fx/materialize.py": {
        "call_runner.__module__",
        "call_runner.__name__",
        "call_runner.__qualname__",
    },
    "passes/fx/program.py": {"teraio_slot.__module__"},
    "passes/inductor/codegen.py": {"common.device_codegens"},
    "runtime/eager/signals.py": {"signal.signal", "signal.getsignal"},
    "runtime/engine/engine.py": {"run_and_end_call._boxed_call"},
    "runtime/ledger/adoption.py": {"tensor.data"},
    "teraio/cli/run.py": {"parser.usage"},
    "teraio/launch/bootstrap/sitecustomize.py": {"sys.path", "sys.modules"},
    "teraio/launch/compile_calls.py": {"torch.compile"},
    "teraio/launch/moved_models.py": {"torch.nn.Module.to", "torch.nn.Module.cuda"},
    "teraio/launch/torch_import.py": {"spec.loader", "module.__loader__", "module.__spec__.loader"},
    "teraio/in_place.py": {"owner.__getstate__"},
    "teraio/launch/trained_models.py": {
        "Optimizer.__init__",
        "Optimizer.add_param_group",
        "torch.autograd.backward",
    },
    "runtime/model/init.py": {"os.environ"},
    "runtime/optimizer/buckets.py": {"made._teraio_walk"},
    "runtime/optimizer/host_step.py": {"twin.grad"},
    "runtime/optimizer/late_step.py": {"part.grad"},
    "runtime/optimizer/slices.py": {"part.grad", "optimizer.state"},
    "runtime/optimizer/trial.py": {"parameter.grad"},
    "runtime/patches/cuda_graphs.py": {"begin_without_moves.teraio_captures"},
    "runtime/patches/pickling.py": {"_serialization._save", "_serialization._legacy_save", "storage.cpu"},
    "runtime/patches/wrapped_functions.py": {"torch.Tensor.tolist", "fetch_and_note_address.teraio_takes"},
    "runtime/store/drive_health.py": {"command.words10", "command.address", "command.data_bytes"},
    "runtime/store/files.py": {"_LIBC.fallocate.argtypes"},
    "runtime/store/gds.py": {"os.environ"},
    "runtime/torch_extension/allocator.py": {"library.teraio_install.restype"},
    "runtime/torch_extension/prebuilt.py": {"loaded.teraio_built_for.restype"},
    "runtime/torch_extension/observer.py": {"function.restype", "function.argtypes"},
    "teraio/backend.py": {"backend.reset", "raised.backend_name", "raised.inner_exception"},
    "teraio/cli/commands/plan.py": {"args.planner"},
    "teraio/session/host_choice.py": {"parameter.grad"},
}


def declared(path: Path) -> set[str]:
    """Return the attributes that the classes of this file declare."""
    found: set[str] = set()
    for node in ast.walk(tree.tree(path)):
        match node:
            case ast.ClassDef(body=body):
                for line in body:
                    targets = (
                        [line.target] if isinstance(line, ast.AnnAssign) else getattr(line, "targets", [])
                    )
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
                    if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "__slots__":
                        found |= {str(name) for name in ast.literal_eval(line.value)}
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def classes(path: Path) -> set[str]:
    """Return the names of this file's classes."""
    return {node.name for node in ast.walk(tree.tree(path)) if isinstance(node, ast.ClassDef)}


def assigned(path: Path) -> Iterator[ast.Attribute]:
    """Yield each attribute that this file assigns or deletes.

    An assignment or deletion of an attribute's item also counts.
    """
    for node in ast.walk(tree.tree(path)):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Attribute):
                yield node.value
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def strange(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the target of each assignment to an attribute of an object that another file
    defines."""
    own, owners = declared(path), {"self", "cls", PARAMETERS, *classes(path)}
    for node in assigned(path):
        if node.attr not in own and ast.unparse(node.value) not in owners:
            yield node.lineno, ast.unparse(node)


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each assignment to another file's object that the lists above do not allow."""
    allowed = ANYWHERE | ALLOWED.get(path.as_posix(), set())
    for line, target in strange(path):
        if target not in allowed:
            yield f"{path}:{line} assigns {target}: give its class a method for it"


def test_attributes_are_assigned_only_in_the_file_of_their_class() -> None:
    found = [fault for path in tree.package().values() for fault in faults(path)]
    assert not found, "\n".join(found)


def test_each_allowed_assignment_exists() -> None:
    allowed = {(path, target) for path, targets in ALLOWED.items() for target in targets}
    found = {(path.as_posix(), target) for path in tree.package().values() for _, target in strange(path)}
    assert allowed <= found


def test_assignment_to_another_files_object_is_found(tmp_path: Path) -> None:
    """Assign and delete attributes in each possible way. The check must find each assignment and each
    deletion."""
    ways = ("record.clean = False", "ledger.serial += 1", "del engine.plan", "ledger.records[1] = record")
    as_in_libraries = ("record.state = EVICTED", "record.data = bytes", "del place.address")
    for number, way in enumerate((*ways, *as_in_libraries, "a.x, (b.pins, c) = d")):
        path = tmp_path / f"{number}.py"
        path.write_text(f"class Own:\n    def method(self):\n        self.x = 1\n        {way}\n")
        assert len(list(faults(path))) == 1, way
