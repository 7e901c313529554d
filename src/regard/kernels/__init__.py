"""How attention is computed: ``reference`` (the truth, any device) and ``native`` (the C++ kernel), behind ``choose``."""
