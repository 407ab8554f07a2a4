"""passes/inductor."""
