"""Symbols of an FX graph with dynamic shapes: the node that binds each symbol, and sizes as nodes of the
graph.

The nodes compute each size at run time, as plain integers. A node *binds* a symbol if its value gives the
symbol's value.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import OptimizedPythonReferenceAnalysis

from ..slots import symbolic_sizes
from ..slots.events import Make

UNKNOWN = 8192  # estimate for a symbol without any limit; Inductor has the same default


def _make_deferred_operator(function: Callable[[Any], Any]) -> Any:
    """Return an operator for numbers and nodes. For a number, it calls `function`. For a node, it adds a node
    that calls `function` at run time.
    """

    def call_or_add_node(x: Any, *_: Any) -> Any:
        if isinstance(x, torch.fx.Proxy):
            return x.tracer.create_proxy("call_function", function, (x,), {})
        return function(x)

    return staticmethod(call_or_add_node)


class SizeOperatorsAsNodes(OptimizedPythonReferenceAnalysis):
    """Operators of size expressions, as nodes of the graph.

    For some operators, torch's class needs numbers as operands. This class adds nodes instead, because the
    operands are nodes without a value.
    """

    int_truediv = staticmethod(operator.truediv)
    floor_to_int = _make_deferred_operator(math.floor)
    ceil_to_int = _make_deferred_operator(math.ceil)
    trunc_to_int = _make_deferred_operator(math.trunc)
    round_to_int = _make_deferred_operator(round)
    trunc = _make_deferred_operator(lambda x: float(math.trunc(x)))
    where = staticmethod(torch.sym_ite)

    @staticmethod
    def identity(x: Any) -> Any:
        return x

    @staticmethod
    def modular_indexing(x: Any, divisor: Any, modulus: Any) -> Any:
        return x // divisor % modulus


@dataclass
class GraphSymbols:
    """The symbols of one graph, with the node that binds each symbol."""

    sources: dict[Any, tuple[int, torch.fx.Node, int | None]] = field(default_factory=dict)
    estimates: dict[Any, Any] = field(default_factory=dict)
    nodes: dict[Any, torch.fx.Node] = field(default_factory=dict)
    shape_env: Any = None

    def note_bound_symbols(self, at: int, node: torch.fx.Node) -> None:
        """Record the symbols whose values this node gives.

        If the node's value is a symbol, record this symbol. If the value is a tensor, record the symbols of
        its dimensions.
        """
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            self._note_symbol_source(value, at, node, None)
        elif isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                if isinstance(size, torch.SymInt):
                    self._note_symbol_source(size, at, node, dimension)
        for symbol in node.meta.get("unbacked_bindings") or ():
            self.estimates[symbol] = _limit_of_unbacked_symbol(symbol, node)

    def _note_symbol_source(
        self, size: torch.SymInt, at: int, node: torch.fx.Node, dimension: int | None
    ) -> None:
        symbol, self.shape_env = size.node.expr, size.node.shape_env
        if isinstance(symbol, sympy.Symbol) and symbol not in self.sources:
            self.sources[symbol] = (at, node, dimension)

    def insert_size_node(self, graph: torch.fx.Graph, live: Any, at: int) -> Any:
        """Insert nodes that compute the expression `live`, and return the last of these nodes.

        Replace each symbol that no node before position `at` binds by an estimate. Return a number if no
        symbol remains. Return None if `live` is a number already.
        """
        if isinstance(live, int):
            return None
        for symbol in live.free_symbols - self.estimates.keys():
            self.estimates[symbol] = self._traced_value_or_default(symbol)
        live = symbolic_sizes.replace_unbound_symbols(
            live, lambda s: s in self.sources and self.sources[s][0] < at, self.estimates
        )
        if isinstance(live, int):
            return live
        tracer = torch.fx.proxy.GraphAppendingTracer(graph)
        values = {
            s: torch.fx.Proxy(self._get_or_insert_symbol_node(graph, s), tracer) for s in live.free_symbols
        }
        return sympy_interp(SizeOperatorsAsNodes, values, live).node

    def _traced_value_or_default(self, symbol: Any) -> int:
        """Return the symbol's value from the trace of the graph, or UNKNOWN."""
        return (
            UNKNOWN
            if self.shape_env is None
            else symbolic_sizes.size_at_traced_shapes(symbol, self.shape_env, UNKNOWN)
        )

    def _get_or_insert_symbol_node(self, graph: torch.fx.Graph, symbol: Any) -> torch.fx.Node:
        """Return the node with the value of a symbol.

        If the symbol is a tensor's dimension, insert a node that reads the dimension, after the node that
        makes the tensor.
        """
        if symbol not in self.nodes:
            _, source, dimension = self.sources[symbol]
            if dimension is not None:
                after = source
                while after.next.op == "placeholder":
                    after = after.next
                with graph.inserting_after(after):
                    shape = graph.call_method("size", (source, dimension))
                source = shape
            self.nodes[symbol] = source
        return self.nodes[symbol]


def _limit_of_unbacked_symbol(symbol: Any, node: torch.fx.Node) -> Any:
    """Return an upper limit of a symbol whose value depends on the values in a tensor.

    If torch has no limit for the symbol, return the number of elements of the node's largest input.
    """
    value = node.meta["val"]
    values = [v for v in (value if isinstance(value, tuple | list) else [value]) if hasattr(v, "shape")]
    dimensions = [d for v in values for d in v.shape if isinstance(d, torch.SymInt)]
    if (
        dimensions
        and (limit := symbolic_sizes.upper_limit_of_symbol(symbol, dimensions[0].node.shape_env)) is not None
    ):
        return limit
    tensors = [n.meta["val"] for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    counts = [t.numel() for t in tensors]
    made = [Make(0, "", 0, c.node.expr if isinstance(c, torch.SymInt) else sympy.Integer(c)) for c in counts]
    return symbolic_sizes.largest(made, "").bytes_or_expression if made else UNKNOWN
