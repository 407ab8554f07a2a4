"""passes/planner/published."""
