"""passes/planner/bound."""
