"""The kernels that compute attention: ``reference`` (plain PyTorch, any device) and ``native`` (C++, CPU)."""
