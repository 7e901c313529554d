"""Attention over sequences that outgrow one process."""
