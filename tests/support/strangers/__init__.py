"""Models and training loops of other projects, which `tests/long/what_strangers_write.py` trains."""
