"""Models and training loops that nobody here chose: `tests/long/strangers.py` trains them."""
