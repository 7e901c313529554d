"""The Budget page of the lab: size a model before it exists."""
