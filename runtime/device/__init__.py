"""runtime/device."""
