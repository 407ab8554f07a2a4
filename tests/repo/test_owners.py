"""Tests that only methods of an object change its attributes: each file assigns attributes of its own classes
only.

The attributes of a file's classes are those that the classes declare in `__slots__`, in the class body, or by
`self.name = ...`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tree

# Attributes of library objects that have no method to set them.
LIBRARY = {
    "description": "argparse",
    "epilog": "argparse",
    "planner": "argparse: a namespace",
    "grad": "torch: a tensor",
    "data": "torch: a tensor",
    "meta": "torch.fx: a node",
    "state": "torch: an optimizer",
    "device_codegens": "torch: Inductor's table",
    "environ": "os",
    "backend_name": "torch: Dynamo's exception",
    "inner_exception": "torch: Dynamo's exception",
    "address": "ctypes: a structure",
    "data_bytes": "ctypes: a structure",
    "words10": "ctypes: a structure",
    "restype": "ctypes",
    "argtypes": "ctypes",
    "signal": "a function of a module, which is wrapped",
    "getsignal": "a function of a module, which is wrapped",
    "tolist": "a function of torch, which is wrapped",
    "__new__": "a function of torch, which is wrapped",
    "_save": "a function of torch, which is wrapped",
    "_legacy_save": "a function of torch, which is wrapped",
    "cpu": "a function of torch, which is wrapped",
}
PARAMETERS = "solver.parameters"  # a message object of ortools
# Attributes of functions and objects that are made in the same file.
OWN_FUNCTIONS = {
    *("__module__", "__name__", "__qualname__", "_boxed_call", "reset"),
    *("teraio_captures", "teraio_takes", "_teraio_walk"),
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

    An attribute also counts if the file assigns or deletes one of its items.
    """
    for node in ast.walk(tree.tree(path)):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if isinstance(node.value, ast.Attribute):
                yield node.value
        elif isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            yield node


def faults(path: Path) -> Iterator[str]:
    """Yield a line for each assignment to an attribute of another file's object."""
    own, owners = declared(path), {"self", "cls", PARAMETERS, *classes(path)}
    for node in assigned(path):
        owner = ast.unparse(node.value)
        if owner in owners or node.attr in own | LIBRARY.keys() | OWN_FUNCTIONS:
            continue
        yield f"{path}:{node.lineno} assigns {owner}.{node.attr}: give its class a method for it"


def test_attributes_are_assigned_only_in_the_file_of_their_class() -> None:
    found = [fault for path in tree.package().values() for fault in faults(path)]
    assert not found, "\n".join(found)


def test_assignment_to_another_files_object_is_found(tmp_path: Path) -> None:
    """Assign and delete attributes in each possible way. Check that the test above reports each assignment
    and each deletion."""
    ways = ("record.clean = False", "ledger.serial += 1", "del engine.plan", "ledger.records[1] = record")
    for number, way in enumerate((*ways, "a.x, (b.pins, c) = d")):
        path = tmp_path / f"{number}.py"
        path.write_text(f"class Own:\n    def method(self):\n        self.x = 1\n        {way}\n")
        assert len(list(faults(path))) == 1, way
