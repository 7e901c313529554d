// Finds the supported instruction sets, with the cpuid instruction on x86, and reads the environment variable REGARD_ISA.
#include "instruction_sets.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define REGARD_X86 1
#include <cpuid.h>
#elif defined(REGARD_ARM_KERNELS) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(REGARD_ARM_KERNELS) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace regard {
namespace {

constexpr InstructionSet kAllSets[] = {
    InstructionSet::portable,
#ifdef REGARD_EMULATION
    InstructionSet::emulated,
#endif
#ifdef REGARD_X86_KERNELS
    InstructionSet::avx2,
    InstructionSet::avx512,
    InstructionSet::avx512bf16,
#endif
#ifdef REGARD_ARM_KERNELS
    InstructionSet::neon,
    InstructionSet::neonbf16,
#endif
};

#ifdef REGARD_X86

struct CpuidRegisters {
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
};

// All zero, which means "nothing supported", if the processor does not have the leaf.
CpuidRegisters cpuid(unsigned leaf, unsigned subleaf) {
    CpuidRegisters registers;
    __get_cpuid_count(leaf, subleaf, &registers.a, &registers.b, &registers.c, &registers.d);
    return registers;
}

bool has_bits(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Which registers the operating system saves at a context switch (XCR0). A processor may have AVX-512 on a system that
// does not save the AVX-512 registers; their contents would be lost at a context switch.
unsigned saved_registers() {
    constexpr unsigned kOsxsave = 1u << 27;
    if (!has_bits(cpuid(1, 0).c, kOsxsave)) return 0;
    unsigned low;
    unsigned high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

InstructionSet detect_best() {
    // Bit numbers as in the processor manuals: leaf 1 ECX, leaf 7.0 EBX, leaf 7.1 EAX, XCR0.
    constexpr unsigned kFma = 1u << 12;
    constexpr unsigned kAvx = 1u << 28;
    constexpr unsigned kF16c = 1u << 29;
    constexpr unsigned kAvx2 = 1u << 5;
    constexpr unsigned kAvx512F = 1u << 16;
    constexpr unsigned kAvx512Dq = 1u << 17;
    constexpr unsigned kAvx512Bw = 1u << 30;
    constexpr unsigned kAvx512Vl = 1u << 31;
    constexpr unsigned kAvx512Bf16 = 1u << 5;
    constexpr unsigned kYmm = 0x06;
    constexpr unsigned kZmm = 0xe6;

    const unsigned saved = saved_registers();
    const unsigned leaf1 = cpuid(1, 0).c;
    const unsigned leaf7 = cpuid(7, 0).b;
    const unsigned leaf7_1 = cpuid(7, 1).a;

    if (!has_bits(saved, kYmm) || !has_bits(leaf1, kAvx | kFma | kF16c) || !has_bits(leaf7, kAvx2))
        return InstructionSet::portable;
    if (!has_bits(saved, kZmm) || !has_bits(leaf7, kAvx512F | kAvx512Dq | kAvx512Bw | kAvx512Vl))
        return InstructionSet::avx2;
    return has_bits(leaf7_1, kAvx512Bf16) ? InstructionSet::avx512bf16 : InstructionSet::avx512;
}

#elif defined(REGARD_ARM_KERNELS)

// The operating system reports the extensions of an ARM processor. A system that reports nothing gets NEON.
bool has_bf16() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16, which older headers do not define
    return (getauxval(AT_HWCAP2) & kBf16) != 0;
#elif defined(__APPLE__)
    int value = 0;
    size_t size = sizeof value;
    return sysctlbyname("hw.optional.arm.FEAT_BF16", &value, &size, nullptr, 0) == 0 && value != 0;
#else
    return false;
#endif
}

InstructionSet detect_best() { return has_bf16() ? InstructionSet::neonbf16 : InstructionSet::neon; }

#else

InstructionSet detect_best() { return InstructionSet::portable; }

#endif

void append_name(std::string& list, InstructionSet set) {
    if (!list.empty()) list += ", ";
    list += name_of(set);
}

InstructionSet choose() {
    const InstructionSet best = supported_instruction_sets().back();
    const char* variable = std::getenv("REGARD_ISA");
    if (variable == nullptr || *variable == '\0') return best;

    const std::string requested = variable;
    std::string known;
    std::string supported;
    for (InstructionSet set : kAllSets) {
        if (set <= best && requested == name_of(set)) return set;
        if (set <= best) append_name(supported, set);
        append_name(known, set);
    }
    throw std::invalid_argument("REGARD_ISA must name an instruction set that this machine can run, got " + requested +
                                "; this machine can run " + supported + " (known names: " + known + ")");
}

}  // namespace

const char* name_of(InstructionSet set) {
    switch (set) {
        case InstructionSet::emulated: return "emulated";
        case InstructionSet::avx2: return "avx2";
        case InstructionSet::avx512: return "avx512";
        case InstructionSet::avx512bf16: return "avx512bf16";
        case InstructionSet::neon: return "neon";
        case InstructionSet::neonbf16: return "neonbf16";
        default: return "portable";
    }
}

const std::vector<InstructionSet>& supported_instruction_sets() {
    static const std::vector<InstructionSet> sets = [] {
        const InstructionSet best = detect_best();
        std::vector<InstructionSet> supported;
        for (InstructionSet set : kAllSets)
            if (set <= best) supported.push_back(set);
        return supported;
    }();
    return sets;
}

InstructionSet chosen_instruction_set() {
    static const InstructionSet chosen = choose();
    return chosen;
}

}  // namespace regard
