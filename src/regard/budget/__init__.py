"""A planner: parameters, FLOPs, bytes and time of attention and transformers, derived, not measured."""
