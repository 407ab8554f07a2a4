"""passes/planner/greedy."""
