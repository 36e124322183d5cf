"""What every part knows: values, version arithmetic, the ledger. Standard library only."""
