"""Image models that only the training tasks use, one per file."""
