"""One claim per file. The file has the name of the claim's id, with underscores."""
