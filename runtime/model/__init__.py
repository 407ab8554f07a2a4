"""runtime/model."""
