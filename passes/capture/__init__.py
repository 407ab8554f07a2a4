"""passes/capture."""
