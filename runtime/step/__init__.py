"""runtime/step."""
