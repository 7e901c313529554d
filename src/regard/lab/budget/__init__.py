"""The Budget page of the lab: parameters, FLOPs, memory and time of a model before it is built."""
