// Defines the table of kernels REGARD_KERNELS in the namespace REGARD_ISA_NAMESPACE. Each kernels_*.cpp sets the two
// names, includes this file once, and is compiled with the flags of its instruction set (CMakeLists.txt).
#include "backward.h"
#include "decode_block.h"
#include "kernels.h"
#include "second_pass.h"

namespace regard {
extern const Kernels REGARD_KERNELS;
const Kernels REGARD_KERNELS = {
    REGARD_ISA_NAMESPACE::forward, REGARD_ISA_NAMESPACE::backward, REGARD_ISA_NAMESPACE::second_pass,
    REGARD_ISA_NAMESPACE::linear,  REGARD_ISA_NAMESPACE::norm,     REGARD_ISA_NAMESPACE::rope,
    REGARD_ISA_NAMESPACE::decode_block,
};
}  // namespace regard
