"""runtime/torch_extension."""
