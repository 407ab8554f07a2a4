"""passes/planner/exact."""
