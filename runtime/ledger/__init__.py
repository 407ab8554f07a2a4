"""runtime/ledger."""
