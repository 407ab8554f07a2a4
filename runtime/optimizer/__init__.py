"""runtime/optimizer."""
