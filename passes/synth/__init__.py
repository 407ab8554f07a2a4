"""passes/synth."""
