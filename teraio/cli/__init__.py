"""teraio/cli."""
