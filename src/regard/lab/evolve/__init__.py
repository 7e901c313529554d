"""The Evolve page of the lab: how heads change during training."""
