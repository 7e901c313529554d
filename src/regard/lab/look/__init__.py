"""The Look page of the lab: every head of a model on a text or a picture."""
