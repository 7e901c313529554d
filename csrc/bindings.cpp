// The Python module regard._native. Only bindings*.cpp and tensor_arguments.* use nanobind and Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "threads.h"
#include "tensor_arguments.h"

NB_MODULE(_native, module) {
    using namespace regard;

    module.doc() = "The compiled part of regard. Call it through regard.kernels.native and native_decode_layers.";
    may_use_threads();  // remembers the process that loaded the module: a child of fork() runs on one thread

    module.def(
        "instruction_sets",
        [] {
            std::vector<std::string> names;
            for (InstructionSet set : supported_instruction_sets()) names.emplace_back(name_of(set));
            return names;
        },
        "Names of the instruction sets that this machine can run, weakest first, best last.");

    // std::invalid_argument reaches Python as ValueError.
    module.def(
        "chosen_instruction_set", [] { return name_of(chosen_instruction_set()); },
        "Name of the instruction set in use: the best one, or the one that REGARD_ISA names.");

    bind_attention(module);
    bind_decode(module);
}
