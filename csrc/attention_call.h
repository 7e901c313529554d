// The arguments of the attention kernels: pointers, strides in elements, sizes and numbers. No Python, no torch.
//
// Sizes have one letter each, here and in the Python package: B batch entries, H query heads, G key/value heads,
// N queries, M keys, D width of queries and keys, E width of values. Indices: b, h, g, i (query), j (key).
#pragma once

#include <cstdint>
#include <vector>

namespace regard {

enum class Dtype { float32, bfloat16, float16 };

constexpr int64_t bytes_per_element(Dtype dtype) { return dtype == Dtype::float32 ? 4 : 2; }

// A tensor [B, H, rows, columns]. A broadcast dimension has stride 0. Columns are contiguous in q, k, v, out and the
// gradients; mask and bias may have any column stride.
struct TensorView {
    void* data = nullptr;
    int64_t batch_stride = 0;
    int64_t head_stride = 0;
    int64_t row_stride = 0;
    int64_t column_stride = 1;

    explicit operator bool() const { return data != nullptr; }
};

// The coordinate of a token without a position (NO_POSITION in regard/_lowered_scores.py). It has no relative bias.
constexpr int64_t kNoPosition = -(int64_t{1} << 30);

// a + b and a − b of positions, which wrap around like the int64 of torch. The positions of a file may be any numbers,
// and the overflow of a signed sum would be undefined.
constexpr int64_t add_positions(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}

constexpr int64_t subtract_positions(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}

// One relative bias: bias += table[b, h, i, column], where column = key_positions[j] − query_positions[i] −
// first_offset, clamped to 0 … columns − 1.
struct RelativeTerm {
    TensorView table;      // float32
    bool per_row = false;  // whether each query has its own row of the table
    int64_t columns = 0;
    int64_t first_offset = 0;
    const int64_t* query_positions = nullptr;  // [N]
    const int64_t* key_positions = nullptr;    // [M]
    // True if query i is at position i + query_offset, key j at position j, and all queries share one row of the table.
    // The bias then depends only on i − j. The sum of all such terms is one vector, and the lanes of a panel read
    // neighbouring elements of it.
    bool is_toeplitz = false;
    int64_t query_offset = 0;
};

struct Observables;

struct AttentionCall {
    int64_t B = 0;
    int64_t H = 0;
    int64_t G = 0;
    int64_t N = 0;
    int64_t M = 0;
    int64_t D = 0;
    int64_t E = 0;
    Dtype dtype = Dtype::float32;
    TensorView q;
    TensorView k;
    TensorView v;
    TensorView out;
    // Each row's largest logit and Σ e^(logit − row_max), [B, H, N]: −inf and 0 in a row that sees no key. The forward
    // pass writes them unless they are null; the other passes read them.
    double* row_max = nullptr;
    double* row_sum = nullptr;
    // Query i sees the keys lo[b, i] ≤ j < hi[b, i]; null means 0 and M. Rows are contiguous.
    const int64_t* lo = nullptr;
    const int64_t* hi = nullptr;
    int64_t lo_batch_stride = 0;
    int64_t hi_batch_stride = 0;
    TensorView mask;  // uint8, 0 hides a key
    TensorView bias;  // float32, −inf hides a key
    std::vector<RelativeTerm> terms;
    const float* sinks = nullptr;  // [H]
    double scale = 1;
    double softcap = 0;  // 0 disables it
    double dropout = 0;
    int64_t seed = 0;
    int threads = 1;
    // Hard attention (scale = inf): the largest visible product q·k of each row, [B, H, N]. A separate pass fills it.
    float* hard_max = nullptr;
    const Observables* observables = nullptr;
};

// The measurements of the forward pass, made while it computes the output. Row values are [B, H, N].
struct Observables {
    float* logit_max = nullptr;
    float* entropy = nullptr;
    float* peak = nullptr;
    float* offset = nullptr;
    float* distance = nullptr;
    float* sink = nullptr;
    float* local = nullptr;
    int64_t* peak_at = nullptr;
    int64_t* visible = nullptr;
    int64_t query_offset = 0;  // query i stands at i + query_offset
    int64_t sink_keys = 0;     // `sink` is the weight on keys j < sink_keys
    int64_t local_radius = 0;  // `local` is the weight on keys at most this far from the query
    int64_t map_size = 0;      // the pooled map has map_size × map_size cells; 0: no map
    int64_t* map = nullptr;    // [H, map_size, map_size]: sums over the counted rows, integers in units of 2^−32
    const uint8_t* real_queries = nullptr;  // [B or 1, N]: 0 for padding; null: all rows are real
    int64_t real_queries_batch_stride = 0;
    int64_t group_count = 0;              // how many groups of keys; 0: none are measured
    float* groups = nullptr;              // [B, H, N, group_count]: the weight of each row on each group
    const int64_t* key_groups = nullptr;  // [B or 1, M]: the group of each key, −1 for a key in no group
    int64_t key_groups_batch_stride = 0;
};

// The measurements of a second pass. They need the final row_max and row_sum of each row.
struct SecondPass {
    const uint8_t* counted = nullptr;  // [B, H, N]: 1 for real queries that see a key
    int64_t* key_mass = nullptr;       // [H, M], in units of 2^−32
    int64_t* profile = nullptr;        // [H, 2·profile_radius + 1]: weights by j − i, in units of 2^−32
    int64_t* profile_rows = nullptr;   // [H, 2·profile_radius + 1]: how many rows have a visible key there
    int64_t profile_radius = 0;
    int64_t query_offset = 0;  // query i stands at i + query_offset
    int64_t top_count = 0;     // how many of a row's largest weights to keep
    float* top = nullptr;      // [B, H, N, top_count]
    int64_t* top_at = nullptr;
    // Bin t holds the keys bin_edges[t] ≤ j < bin_edges[t + 1]. Keys outside all bins are not read.
    int64_t bin_count = 0;
    const int64_t* bin_edges = nullptr;
    float* bin_masses = nullptr;  // [B, H, N, bin_count]: each row's weight on each bin
};

// The gradient of the output, which the backward pass reads, and the gradients to which it adds. The latter are
// float32, and the caller fills them with zeros.
struct Gradients {
    TensorView grad_out;             // in the call's dtype
    // The gradients of the row values entropy and logit_max, [B, H, N]; null: no loss contains them. Each comes with
    // the value that the forward pass measured.
    const float* grad_entropy = nullptr;
    const float* entropy = nullptr;
    const float* grad_logit_max = nullptr;
    const int64_t* peak_at = nullptr;
    float* dq = nullptr;             // [B, H, N, D]
    float* dk = nullptr;             // [B, G, M, D]
    float* dv = nullptr;             // [B, G, M, E]
    float* delta = nullptr;          // [B, H, N]: out · grad_out, filled by the backward pass
    float* toeplitz = nullptr;       // [B, H, N + M]: of the sum of all Toeplitz terms, index i − j + M
    TensorView bias;                 // of the dense bias; a stride is 0 where the bias is broadcast
    std::vector<float*> terms;       // of each term, [B, H, N or 1, columns]; null for a Toeplitz term
    // Attribution: sums of the contributions A_ij · (grad_out_i · v_j), with the weights that dropout left. Null: they
    // are not collected. The sum of a row needs no place here, because it is delta.
    float* contributed_keys = nullptr;   // [B, H, M]: sums over the queries
    float* contributed_map = nullptr;    // [B, H, contributed_bins, contributed_bins]: sums over bins of both
    int64_t contributed_bins = 0;
};

}  // namespace regard
