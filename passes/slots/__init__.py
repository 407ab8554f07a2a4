"""passes/slots."""
