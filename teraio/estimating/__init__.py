"""teraio/estimating."""
