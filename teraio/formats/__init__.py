"""teraio/formats."""
