"""runtime/patches."""
