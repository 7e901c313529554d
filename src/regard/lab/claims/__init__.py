"""The Claims page of the lab: the list of all claims (the ledger), and their checks with other parameters."""
