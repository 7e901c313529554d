// The three matrix products of attention, in blocks whose sums stay in registers. In the first two, each lane belongs
// to one query, and the elements of keys and values are broadcast from their rows, so K and V are never packed. In the
// third, each lane belongs to one feature, and the weights are broadcast. W, NR and PW are defined in simd.h. The index v
// counts vectors: those of a panel, or in the third product those of the features.
//
// A product may compute only some of the NR vectors of a panel, VECTORS of them: the pointers then point to the first.
#pragma once

#include <algorithm>
#include <type_traits>

#include "bf16_pairs.h"

namespace regard {
namespace REGARD_ISA_NAMESPACE {

// --- what is multiplied ---

// A product multiplies units of 32 bits: one float32 number, or a pair of bfloat16 numbers (bf16_pairs.h). An operand
// has the operations for one kind of unit. A pair may lie at any address of a bfloat16 number.

struct Float32Operand {
    typedef Floats Vector;
    REGARD_INLINE Vector load(const void* p) { return *static_cast<const UnalignedFloats*>(p); }
    REGARD_INLINE Vector broadcast_unit(const char* p) { return broadcast(*reinterpret_cast<const float*>(p)); }
    REGARD_INLINE Floats add_product(Floats sum, Vector a, Vector b) { return sum + a * b; }
#if defined(REGARD_USE_NEON)
    // sum + a · elements[LANE]
    template <int LANE>
    REGARD_INLINE Floats add_lane_product(Floats sum, Vector a, Vector elements) {
        return vfmaq_laneq_f32(sum, a, elements, LANE);
    }
#endif
};

struct PairOperand {
    typedef UInts Vector;
    REGARD_INLINE Vector load(const void* p) { return load_pairs(p); }
    REGARD_INLINE Vector broadcast_unit(const char* p) { return broadcast_pair(pair_at(p)); }
    REGARD_INLINE Floats add_product(Floats sum, Vector a, Vector b) { return add_pair_products(sum, a, b); }
#if defined(REGARD_USE_NEON)
    template <int LANE>
    REGARD_INLINE Floats add_lane_product(Floats sum, Vector a, Vector elements) {
        return add_lane_pair_products<LANE>(sum, a, elements);
    }
#endif
};

// Where the elements lie that are broadcast.
enum class Elements {
    along_rows,     // element t of row r is unit t of row r: keys, whose features are summed
    along_columns,  // element t of row r is unit r of row t: values, whose keys are summed
};

// --- one block ---

// The number of rows of a block: with fewer vectors there is room for more rows, and about eight sums are needed at
// least, because an addition waits for the one before it.
template <int ROWS_OF_WHOLE_PANEL, int VECTORS>
constexpr int block_rows = VECTORS == NR ? ROWS_OF_WHOLE_PANEL : std::min(8, ROWS_OF_WHOLE_PANEL * NR / VECTORS);

// Adds element t of each row times vectors[t] to `sums`, for 0 ≤ t < count. `stride` is in bytes, `vector_stride` in
// units.
#if defined(REGARD_USE_NEON)

// On ARM one instruction multiplies a vector by one element of another vector. Elements are therefore loaded four at a
// time, instead of one by one into all lanes: this saves most loads.

// Reads VECTORS vectors and moves the address to the next ones.
template <class Operand, int VECTORS>
REGARD_INLINE void load_next(const char*& address, int64_t bytes, typename Operand::Vector (&x)[VECTORS]) {
#if defined(__clang__)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) x[v] = Operand::load(address + v * W * 4);
    address += bytes;
#else
    if constexpr (VECTORS == 4) {
        // One instruction loads four vectors and moves the address, if GCC does not see how the address will change.
        const float32x4x4_t loaded = vld1q_f32_x4(reinterpret_cast<const float*>(address));
        address += bytes;
        __asm__("" : "+r"(address));
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) x[v] = reinterpret_cast<typename Operand::Vector>(loaded.val[v]);
    } else {
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) x[v] = Operand::load(address + v * W * 4);
        address += bytes;
    }
#endif
}

// Reads a vector and moves the address, with one instruction. The compilers use two.
template <class Operand>
REGARD_INLINE typename Operand::Vector load_and_move(const char*& address, int64_t bytes) {
    typename Operand::Vector x;
    typedef char Bytes16[16];
    __asm__("ld1 {%0.4s}, [%1], %2" : "=w"(x), "+r"(address) : "r"(bytes), "m"(*reinterpret_cast<const Bytes16*>(address)));
    return x;
}

// Two units, in the first lanes of a vector.
template <class Operand>
REGARD_INLINE typename Operand::Vector load_two(const char* p) {
    const uint32x2_t two = vld1_u32(reinterpret_cast<const uint32_t*>(p));
    return reinterpret_cast<typename Operand::Vector>(vcombine_u32(two, vdup_n_u32(0)));
}

// sums[v] += x[v] · elements[LANE]
template <class Operand, int LANE, int VECTORS>
REGARD_INLINE void add_lane(Floats (&sums)[VECTORS], const typename Operand::Vector (&x)[VECTORS],
                            typename Operand::Vector elements) {
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[v] = Operand::template add_lane_product<LANE>(sums[v], x[v], elements);
}

template <class Operand, int LANE, int ROWS, int VECTORS>
REGARD_INLINE void add_lane_of_rows(const char*& vectors, int64_t bytes,
                                    const typename Operand::Vector (&elements)[ROWS], Floats (&sums)[ROWS][VECTORS]) {
    typename Operand::Vector x[VECTORS];
    load_next<Operand>(vectors, bytes, x);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++) add_lane<Operand, LANE>(sums[r], x, elements[r]);
}

template <class Operand, Elements layout, int ROWS, int VECTORS>
REGARD_INLINE void add_products(const char* elements, int64_t stride, const void* vectors, int64_t vector_stride,
                                Floats (&sums)[ROWS][VECTORS], int64_t count) {
    typedef typename Operand::Vector Vector;
    const char* next = static_cast<const char*>(vectors);
    const int64_t bytes = vector_stride * 4;
    int64_t t = 0;
    if constexpr (layout == Elements::along_rows) {
        for (; t + 4 <= count; t += 4) {
            Vector row_elements[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) row_elements[r] = Operand::load(elements + r * stride + t * 4);
            add_lane_of_rows<Operand, 0>(next, bytes, row_elements, sums);
            add_lane_of_rows<Operand, 1>(next, bytes, row_elements, sums);
            add_lane_of_rows<Operand, 2>(next, bytes, row_elements, sums);
            add_lane_of_rows<Operand, 3>(next, bytes, row_elements, sums);
        }
        for (; t < count; t++) {
            Vector row_elements[ROWS];
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) row_elements[r] = Operand::broadcast_unit(elements + r * stride + t * 4);
            add_lane_of_rows<Operand, 0>(next, bytes, row_elements, sums);
        }
    } else {
        const char* row = elements;
#pragma GCC unroll 4
        for (; t < count; t++) {
            Vector x[VECTORS];
            load_next<Operand>(next, bytes, x);
            // The rows after the last four come first, because the load of the first four moves the address.
            constexpr int rest = ROWS / 4 * 4;
            if constexpr (ROWS - rest == 2) {
                const Vector two = load_two<Operand>(row + rest * 4);
                add_lane<Operand, 0>(sums[rest], x, two);
                add_lane<Operand, 1>(sums[rest + 1], x, two);
            } else {
#pragma GCC unroll 4
                for (int r = rest; r < ROWS; r++)
                    add_lane<Operand, 0>(sums[r], x, Operand::broadcast_unit(row + r * 4));
            }
#pragma GCC unroll 4
            for (int r = rest - 4; r >= 0; r -= 4) {
                const Vector four = r ? Operand::load(row + r * 4) : load_and_move<Operand>(row, stride);
                add_lane<Operand, 0>(sums[r], x, four);
                add_lane<Operand, 1>(sums[r + 1], x, four);
                add_lane<Operand, 2>(sums[r + 2], x, four);
                add_lane<Operand, 3>(sums[r + 3], x, four);
            }
            if constexpr (rest == 0) row += stride;
        }
    }
}

#else

template <class Operand, Elements layout, int ROWS, int VECTORS>
REGARD_INLINE void add_products(const char* elements, int64_t stride, const void* vectors, int64_t vector_stride,
                                Floats (&sums)[ROWS][VECTORS], int64_t count) {
    typedef typename Operand::Vector Vector;
    constexpr bool along_rows = layout == Elements::along_rows;
#pragma GCC unroll 4
    for (int64_t t = 0; t < count; t++) {
        Vector x[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            x[v] = Operand::load(static_cast<const char*>(vectors) + (t * vector_stride + v * W) * 4);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            const char* address = along_rows ? elements + r * stride + t * 4 : elements + t * stride + r * 4;
            const Vector element = Operand::broadcast_unit(address);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) sums[r][v] = Operand::add_product(sums[r][v], element, x[v]);
        }
    }
}

#endif

// out[r] = Σ_t element[r][t] · vectors[t] for ROWS rows; with `add`, out[r] += …. Sums are multiplied by `factor` if they
// are products of pairs and not added.
template <class Operand, Elements layout, int ROWS, int VECTORS, bool add>
REGARD_INLINE void multiply_block(const char* elements, int64_t stride, const void* vectors, int64_t vector_stride,
                                  float* out, int64_t out_stride, int64_t count, float factor) {
    constexpr bool scales = std::is_same<Operand, PairOperand>::value && !add;
    Floats sums[ROWS][VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++) sums[r][v] = add ? load(out + r * out_stride + v * W) : Floats{};
    add_products<Operand, layout>(elements, stride, vectors, vector_stride, sums, count);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; v++)
            store(out + r * out_stride + v * W, scales ? sums[r][v] * factor : sums[r][v]);
}

// --- whole products ---

// Calls work(VECTORS) with the number of vectors as a compile-time constant.
template <class Work>
REGARD_INLINE void with_vectors(int vectors, const Work& work) {
    if (vectors >= NR) return work(std::integral_constant<int, NR>());
    if constexpr (NR > 3)
        if (vectors == 3) return work(std::integral_constant<int, 3>());
    if constexpr (NR > 2)
        if (vectors == 2) return work(std::integral_constant<int, 2>());
    work(std::integral_constant<int, 1>());
}

// Calls work(ROWS, first) for blocks of rows that cover 0 … count − 1: blocks of `rows`, then smaller ones.
template <int rows, class Work>
REGARD_INLINE void for_blocks(int64_t count, const Work& work) {
    int64_t first = 0;
    for (; first + rows <= count; first += rows) work(std::integral_constant<int, rows>(), first);
    for (; first + 4 <= count; first += 4) work(std::integral_constant<int, 4>(), first);
    switch (count - first) {
        case 3: return work(std::integral_constant<int, 3>(), first);
        case 2: return work(std::integral_constant<int, 2>(), first);
        case 1: return work(std::integral_constant<int, 1>(), first);
        default: return;
    }
}

// scores[j][lane] = Σ_t keys[j][t] · queries[t][lane] for `count` keys of `units` units. The stride of the keys is in
// bytes. Scores of pairs are multiplied by `factor`. The backward pass also calls it with values and the gradients of
// the outputs.
template <class Operand, int VECTORS>
REGARD_INLINE void dot_products(const char* keys, int64_t stride, const void* queries, float* scores, int64_t count,
                                int64_t units, float factor) {
    for_blocks<block_rows<KEYS_AT_ONCE, VECTORS>>(count, [&](auto rows, int64_t j) __attribute__((always_inline)) {
        multiply_block<Operand, Elements::along_rows, rows(), VECTORS, false>(keys + j * stride, stride, queries, PW,
                                                                              scores + j * PW, PW, units, factor);
    });
}

// outputs[f][lane] += Σ_j values[j][f] · weights[j][lane] for `count` keys, or pairs of keys, and `width` features. The
// stride of the values is in bytes. The backward pass also calls it with keys and the gradients of the scores.
template <class Operand, int VECTORS>
REGARD_INLINE void weighted_sum(const char* values, int64_t stride, const void* weights, float* outputs, int64_t count,
                                int64_t width) {
    for_blocks<block_rows<FEATURES_AT_ONCE, VECTORS>>(width, [&](auto rows, int64_t f) __attribute__((always_inline)) {
        multiply_block<Operand, Elements::along_columns, rows(), VECTORS, true>(values + f * 4, stride, weights, PW,
                                                                                outputs + f * PW, PW, count, 1.0f);
    });
}

// out[j][f] += Σ_lane weights[j][lane] · rows[lane][f] for `count` keys and `width` features. There is one row per
// query: the query itself, or the gradient of its output. The result is a gradient of the keys or values.
REGARD_INLINE void add_outer_products(const float* weights, const float* rows, int64_t stride, int64_t lanes,
                                      float* out, int64_t out_stride, int64_t count, int64_t width) {
    const auto add_features = [&](int64_t f, auto vectors) __attribute__((always_inline)) {
        for_blocks<block_rows<KEYS_AT_ONCE, vectors()>>(count, [&](auto keys, int64_t j) __attribute__((always_inline)) {
            multiply_block<Float32Operand, Elements::along_rows, keys(), vectors(), true>(
                reinterpret_cast<const char*>(weights + j * PW), PW * 4, rows + f, stride, out + j * out_stride + f,
                out_stride, lanes, 1.0f);
        });
    };
    int64_t f = 0;
    for (; f + PW <= width; f += PW) add_features(f, std::integral_constant<int, NR>());
    const int64_t vectors_left = (width - f) / W;
    if (vectors_left) {
        with_vectors(static_cast<int>(vectors_left),
                     [&](auto vectors) __attribute__((always_inline)) { add_features(f, vectors); });
        f += vectors_left * W;
    }
    for (; f < width; f++)
        for (int64_t j = 0; j < count; j++) {
            float sum = out[j * out_stride + f];
            for (int64_t lane = 0; lane < lanes; lane++) sum += weights[j * PW + lane] * rows[lane * stride + f];
            out[j * out_stride + f] = sum;
        }
}

}  // namespace REGARD_ISA_NAMESPACE
}  // namespace regard
