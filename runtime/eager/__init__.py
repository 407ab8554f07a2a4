"""runtime/eager."""
