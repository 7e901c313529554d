#include "cpu.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define REGARD_X86 1
#include <cpuid.h>
#endif

namespace regard {
namespace {

constexpr InstructionSet kAll[] = {InstructionSet::portable, InstructionSet::avx2, InstructionSet::avx512,
                                   InstructionSet::avx512bf16};

#ifdef REGARD_X86

struct Leaf {
    unsigned a = 0, b = 0, c = 0, d = 0;
};

// All zero, which means "nothing supported", where the processor does not have the leaf.
Leaf cpuid(unsigned leaf, unsigned subleaf) {
    Leaf r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool all_bits(unsigned value, unsigned bits) { return (value & bits) == bits; }

// Which registers the operating system saves at a context switch (XCR0). A processor may have AVX-512 while the system
// does not save its registers; using them then would corrupt them.
unsigned saved_registers() {
    constexpr unsigned kOsxsave = 1u << 27;
    if (!all_bits(cpuid(1, 0).c, kOsxsave)) return 0;
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

InstructionSet detect() {
    // Bit numbers as in the processor manuals: leaf 1 ECX, leaf 7.0 EBX, leaf 7.1 EAX, XCR0.
    constexpr unsigned kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29;
    constexpr unsigned kAvx2 = 1u << 5;
    constexpr unsigned kAvx512F = 1u << 16, kAvx512Dq = 1u << 17, kAvx512Bw = 1u << 30, kAvx512Vl = 1u << 31;
    constexpr unsigned kAvx512Bf16 = 1u << 5;
    constexpr unsigned kYmm = 0x06, kZmm = 0xe6;

    const unsigned saved = saved_registers();
    const unsigned basic = cpuid(1, 0).c, extended = cpuid(7, 0).b, newer = cpuid(7, 1).a;

    if (!all_bits(saved, kYmm) || !all_bits(basic, kAvx | kFma | kF16c) || !all_bits(extended, kAvx2))
        return InstructionSet::portable;
    if (!all_bits(saved, kZmm) || !all_bits(extended, kAvx512F | kAvx512Dq | kAvx512Bw | kAvx512Vl))
        return InstructionSet::avx2;
    return all_bits(newer, kAvx512Bf16) ? InstructionSet::avx512bf16 : InstructionSet::avx512;
}

#else

InstructionSet detect() { return InstructionSet::portable; }

#endif

InstructionSet choose() {
    const auto sets = instruction_sets();
    const char* wanted = std::getenv("REGARD_ISA");
    if (wanted == nullptr || *wanted == '\0') return sets.back();

    std::string known, here;
    for (InstructionSet set : kAll) {
        if (set <= sets.back()) {
            if (wanted == std::string(name(set))) return set;
            here += std::string(here.empty() ? "" : ", ") + name(set);
        }
        known += std::string(known.empty() ? "" : ", ") + name(set);
    }
    throw std::invalid_argument("REGARD_ISA=" + std::string(wanted) + " cannot be honoured: this machine can run " +
                                here + " (known names: " + known + ")");
}

}  // namespace

const char* name(InstructionSet set) {
    switch (set) {
        case InstructionSet::avx2: return "avx2";
        case InstructionSet::avx512: return "avx512";
        case InstructionSet::avx512bf16: return "avx512bf16";
        default: return "portable";
    }
}

std::vector<InstructionSet> instruction_sets() {
    static const InstructionSet best = detect();
    std::vector<InstructionSet> sets;
    for (InstructionSet set : kAll)
        if (set <= best) sets.push_back(set);
    return sets;
}

InstructionSet chosen_instruction_set() {
    static const InstructionSet chosen = choose();
    return chosen;
}

}  // namespace regard
