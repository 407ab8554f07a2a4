"""passes/planner."""
