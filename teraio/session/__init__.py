"""teraio/session."""
