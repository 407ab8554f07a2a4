"""passes/planner/problem."""
