"""runtime/store."""
