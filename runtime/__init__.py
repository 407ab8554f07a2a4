"""Run-time: moves bytes."""
