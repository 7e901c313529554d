// Compares the products of pairs of bfloat16 numbers (bf16_pairs.h) with their definition, bit by bit, on random and
// special numbers. It is compiled twice: with the emulation, and with the instruction of AVX-512 BF16.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#if !defined(__AVX512BF16__)
#define REGARD_EMULATE_AVX512BF16
#endif
#define REGARD_ISA_NAMESPACE pairs_test
#include "bf16_pairs.h"
#include "half_precision.h"

using namespace regard::pairs_test;

namespace {

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

// a·b + c, rounded to nearest even, but 0 below 2^-126: a sum that rounds to 24 digits below 2^-126 counts as subnormal.
// The sum in double is exact where this matters: a sum this small has few digits, or one term that decides alone.
float defined_multiply_add(float a, float b, float c) {
    const double sum = double{a} * b + c;
    const float rounded = std::fma(a, b, c);
    return std::fabs(sum) < 0x1p-126 - 0x1p-151 ? std::copysign(0.0f, rounded) : rounded;
}

// The definition, for one lane.
float defined_sum(float sum, uint32_t a, uint32_t b) {
    const float a_second = flushed(float_from_bits(a & 0xffff0000u));
    const float b_second = flushed(float_from_bits(b & 0xffff0000u));
    const float a_first = flushed(float_from_bits(a << 16));
    const float b_first = flushed(float_from_bits(b << 16));
    sum = defined_multiply_add(a_second, b_second, flushed(sum));
    return defined_multiply_add(a_first, b_first, sum);
}

// The definition of rounding two numbers to a pair.
uint32_t defined_pair(float first, float second) {
    const uint32_t low = float_to_bf16(flushed(first));
    return low | (uint32_t{float_to_bf16(flushed(second))} << 16);
}

constexpr uint32_t kSpecial[] = {
    0x00000000u, 0x80000000u, 0x00000001u, 0x807fffffu, 0x00800000u, 0x80800000u, 0x007fffffu, 0x3f800000u,
    0xbf800000u, 0x3f808000u, 0x3f818000u, 0x3f80ffffu, 0x7f7fffffu, 0xff7fffffu, 0x7f800000u, 0xff800000u,
    0x7fc00000u, 0x7f800001u, 0x33800000u, 0x0d800000u, 0x00008000u, 0x00018000u, 0x7f7f8000u, 0x20000000u,
};

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (a != a && b != b); }

// Returns whether all pairs are right. Not inlined: main must not contain instructions that the processor may not have.
REGARD_NOINLINE bool compare_pairs(long rounds) {
    std::mt19937 random(7);
    constexpr size_t specials = sizeof kSpecial / sizeof *kSpecial;
    const auto bits = [&](int kind) -> uint32_t {
        if (kind == 0) return random();                       // any bits
        if (kind == 1) return kSpecial[random() % specials];  // special numbers
        // Exponents near 1, so that sums cancel and round.
        return (static_cast<uint32_t>(random()) & 0x83ffffffu) | 0x3c000000u;
    };
    long wrong = 0;
    for (long round = 0; round < rounds; round++) {
        const int kind = static_cast<int>(round % 3);
        Floats sum;
        UInts a;
        UInts b;
        for (int lane = 0; lane < W; lane++) {
            sum[lane] = float_from_bits(bits(kind));
            a[lane] = (bits(kind) & 0xffff0000u) | (bits(kind) >> 16);
            b[lane] = (bits(kind) & 0xffff0000u) | (bits(kind) >> 16);
        }
        const Floats found = add_pair_products(sum, a, b);
        const UInts pairs = to_pairs(sum, found);
        for (int lane = 0; lane < W; lane++) {
            const float expected = defined_sum(sum[lane], a[lane], b[lane]);
            const bool number = sum[lane] == sum[lane] && found[lane] == found[lane];
            const bool pair_right = !number || pairs[lane] == defined_pair(sum[lane], found[lane]);
            if (same(found[lane], expected) && pair_right) continue;
            if (wrong++ < 5)
                std::printf("%08x + %08x · %08x: must be %08x, got %08x (pair %08x)\n", bits_of(sum[lane]), a[lane],
                            b[lane], bits_of(expected), bits_of(found[lane]), pairs[lane]);
        }
    }
    std::printf("%ld pairs: %ld differ\n", rounds * W, wrong);
    return wrong == 0;
}

}  // namespace

// Without the vector instructions of this file, which would end the process before its check of the processor.
__attribute__((target("no-avx"))) int main(int argc, char** argv) {
#if defined(__AVX512BF16__)
    const bool can_run = __builtin_cpu_supports("avx512bf16");
    const char* what = "AVX-512 BF16";
#else
    const bool can_run = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const char* what = "AVX2";
#endif
    if (!can_run) {
        std::printf("not run: this processor has no %s\n", what);
        return 0;
    }
    const bool right = compare_pairs(argc > 1 ? std::atol(argv[1]) : 10000000 / W);
    std::printf("%d passed, %d failed\n", right ? 1 : 0, right ? 0 : 1);
    return right ? 0 : 1;
}
