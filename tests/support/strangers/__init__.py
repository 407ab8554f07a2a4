"""Models and training loops that nobody here chose: `tests/long/what_strangers_write.py` trains them."""
