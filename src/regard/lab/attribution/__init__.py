"""The Attribution page: what contributes to a prediction, and what changes if a head is patched."""
