// The Python module regard._native. This is the only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "cpu.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
    m.doc() = "The compiled part of regard. Use it through regard.kernels.native.";

    m.def(
        "instruction_sets",
        [] {
            std::vector<std::string> names;
            for (auto set : regard::instruction_sets()) names.emplace_back(regard::name(set));
            return names;
        },
        "Names of the instruction sets this machine can run, weakest first, best last.");

    // std::invalid_argument reaches Python as ValueError.
    m.def(
        "chosen", [] { return regard::name(regard::chosen_instruction_set()); },
        "Name of the instruction set in use: the best one, or the one that REGARD_ISA names.");
}
