"""passes/planner/search."""
