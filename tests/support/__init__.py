"""Builders and helpers that several test files share."""
