"""The Convolution page of the lab: a convolution kernel and the attention that equals it."""
