"""runtime/engine."""
