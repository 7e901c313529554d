"""How attention is computed: ``reference`` (the truth, any device), ``native`` (the C++ kernel), and ``choose``."""
