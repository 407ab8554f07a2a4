"""passes/fx."""
