"""A lower bound on the optimum of a linear program that a solver's rounding cannot make wrong.

In: rows with integers, and a solver's prices (dual values). Out: an integer at or below the optimum.

By weak duality any prices of the rows, even wrong ones, give a lower bound on the minimum:

    sum over rows (price x low if the price is positive, price x high if it is negative)
    + sum over fractions min(0, -prices x column)        as long as no stall has a negative reduced cost

So the solver's prices need not be exact. This module rounds each price to a multiple of a small unit. It sets
a price to 0 if the row has no limit on that side. If a stall has a negative reduced cost, it scales down the
prices of the rows with this stall. It then computes the sum in integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf, isfinite
from typing import Any

import numpy as np

from ..problem import solvers
from .rows import NS_PER_S, Rows

GRID_BITS = 44  # unit of a rounded price: 2**-44 ns; for 10**12 bytes this rounding costs 0.03 ns
# Errors that MathOpt raises when a solver refuses a model. AttributeError comes from a bug of MathOpt 9.15.
REFUSALS = (RuntimeError, ValueError, AttributeError, TypeError, AssertionError, ArithmeticError, OSError)
GIGA = 10**9  # unit of bytes and ns for the solver, so that the factors are near 1


@dataclass(frozen=True, slots=True)
class Solution:
    """A solver's solution of a linear program (Rows). Stalls are in ns, and other values are fractions."""

    values: tuple[float, ...]  # value of each unknown
    prices: tuple[float, ...]  # price of each row, in ns per unit


def certified_stall_bound_ns(rows: Rows, prices: Sequence[float]) -> int:
    """Return a lower bound on the sum of the stalls. It holds for every solution of the rows, and is at least
    0.
    """
    one = 1 << GRID_BITS
    grid = [round(price * one) if isfinite(price) else 0 for price in prices]
    for row, price in enumerate(grid):
        if (price > 0 and rows.low[row] is None) or (price < 0 and rows.high[row] is None):
            grid[row] = 0
    charges = [0] * rows.stalls
    for row, column, factor in zip(rows.row, rows.column, rows.factor, strict=True):
        if column < rows.stalls:
            charges[column] += grid[row] * factor
    for row, column in zip(rows.row, rows.column, strict=True):
        if column < rows.stalls and charges[column] > one:
            scaled = abs(grid[row]) * one // charges[column]
            grid[row] = scaled if grid[row] > 0 else -scaled
    reduced = [0] * rows.unknowns
    for row, column, factor in zip(rows.row, rows.column, rows.factor, strict=True):
        reduced[column] -= grid[row] * factor
    assert all(cost >= -one for cost in reduced[: rows.stalls])
    total = sum(cost for cost in reduced[rows.stalls :] if cost < 0)
    for price, low, high in zip(grid, rows.low, rows.high, strict=True):
        side = low if price > 0 else high
        total += price * side if price and side is not None else 0
    return max(-(-total // one), 0)


def solve_relaxation(rows: Rows, time_limit_s: float) -> Solution | None:
    """Solve the rows by OR-Tools' simplex. Return None if the time is too short or OR-Tools is missing."""
    if not solvers.is_ortools_installed():
        return None
    from ortools.math_opt.python import mathopt

    unit_ns = [NS_PER_S if column < rows.stalls else 1 for column in range(rows.unknowns)]
    units = _solver_units_by_row(rows)
    model = mathopt.Model.from_model_proto(_build_solver_model(rows, units, unit_ns))
    # No presolve: the solver GLOP solved a program with 28,000 unknowns in 0.6 s without presolve, and in 1.0
    # s with it.
    limits = mathopt.SolveParameters(
        time_limit=timedelta(seconds=max(time_limit_s, 0.001)), presolve=mathopt.Emphasis.OFF
    )
    try:
        result = mathopt.solve(model, mathopt.SolverType.GLOP, params=limits)
        if not (result.has_dual_feasible_solution() and result.has_primal_feasible_solution()):
            return None
        prices, values = result.dual_values(), result.variable_values()
    except REFUSALS:
        return None
    ordered = sorted(prices.items(), key=lambda item: item[0].id)
    found = sorted(values.items(), key=lambda item: item[0].id)
    return Solution(
        tuple(value * unit for (_, value), unit in zip(found, unit_ns, strict=True)),
        tuple(price * NS_PER_S / unit for (_, price), unit in zip(ordered, units, strict=True)),
    )


def _solver_units_by_row(rows: Rows) -> list[int]:
    """Return a unit for each row: GIGA if the row has factors above 1 (bytes or ns), and 1 for rows of
    fractions.
    """
    units = [1] * len(rows.low)
    for row, factor in zip(rows.row, rows.factor, strict=True):
        if abs(factor) > 1:
            units[row] = GIGA
    return units


def _build_solver_model(rows: Rows, units: list[int], unit_ns: list[int]) -> Any:
    """Return the rows as a model of MathOpt.

    Fill the model from arrays, because adding the rows one by one takes longer than the solver.
    """
    from ortools.math_opt import model_pb2

    model = model_pb2.ModelProto()
    variables, conditions, matrix = model.variables, model.linear_constraints, model.linear_constraint_matrix
    fractions = rows.unknowns - rows.stalls
    variables.ids.extend(range(rows.unknowns))
    variables.lower_bounds.extend([0.0] * rows.unknowns)
    variables.upper_bounds.extend([inf] * rows.stalls + [1.0] * fractions)
    variables.integers.extend([False] * rows.unknowns)
    model.objective.linear_coefficients.ids.extend(range(rows.stalls))
    model.objective.linear_coefficients.values.extend([1.0] * rows.stalls)
    conditions.ids.extend(range(len(rows.low)))
    conditions.lower_bounds.extend(-inf if x is None else x / u for x, u in zip(rows.low, units))
    conditions.upper_bounds.extend(inf if x is None else x / u for x, u in zip(rows.high, units))
    row, column = np.array(rows.row, np.int64), np.array(rows.column, np.int64)
    scale = np.array(unit_ns, np.float64)[column] / np.array(units, np.float64)[row]
    order = np.lexsort((column, row))
    matrix.row_ids.extend(row[order].tolist())
    matrix.column_ids.extend(column[order].tolist())
    matrix.coefficients.extend((np.array(rows.factor, np.float64) * scale)[order].tolist())
    return model
