"""passes/planner/simulate."""
