// Attention in plain loops and double precision: what the kernels are compared with. No vectors, no blocks, no threads.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace plain {

// One call, with all numbers as double. Sizes as in attention_call.h.
struct Call {
    int64_t B = 1;
    int64_t H = 1;
    int64_t G = 1;
    int64_t N = 1;
    int64_t M = 1;
    int64_t D = 1;
    int64_t E = 1;
    int64_t group_count = 0;
    std::vector<int64_t> key_groups;  // [B, M]: the group of each key, −1 for none
    std::vector<double> q;         // [B, H, N, D]
    std::vector<double> k;         // [B, G, M, D]
    std::vector<double> v;         // [B, G, M, E]
    std::vector<double> grad_out;  // [B, H, N, E]
    std::vector<int64_t> lo;       // [N], or empty
    std::vector<int64_t> hi;       // [N], or empty
    std::vector<uint8_t> mask;     // [N, M], or empty
    std::vector<double> bias;      // [N, M], or empty
    std::vector<double> table;     // [H, N + M]: the bias of head h at offset key − query is table[h, offset + N]
    std::vector<double> sinks;     // [H], or empty
    double scale = 1;
    double softcap = 0;
    std::vector<double> grad_entropy;    // [B, H, N]: the gradient of a loss by the entropy of each row, or empty
    std::vector<double> grad_logit_max;  // [B, H, N]: by the largest logit of each row, or empty
    int64_t bins = 0;                    // of the map of contributions, per side
};

struct Result {
    std::vector<double> out;       // [B, H, N, E]
    std::vector<double> lse;       // [B, H, N]
    std::vector<double> entropy;   // [B, H, N]
    std::vector<double> peak;      // [B, H, N]
    std::vector<double> distance;  // [B, H, N]
    std::vector<double> key_mass;  // [H, M]
    std::vector<double> dq;
    std::vector<double> dk;
    std::vector<double> dv;
    std::vector<double> groups;     // [B, H, N, group_count]
    std::vector<double> logit_max;  // [B, H, N]
    // Sums of the contributions A_ij · (grad_out_i · v_j): by key [B, H, M], and by cell of a map [B, H, bins, bins].
    std::vector<double> contributed_keys;
    std::vector<double> contributed_map;
};

inline double dot(const double* a, const double* b, int64_t count) {
    double sum = 0;
    for (int64_t t = 0; t < count; t++) sum += a[t] * b[t];
    return sum;
}

inline Result attention(const Call& c) {
    const double hidden = -std::numeric_limits<double>::infinity();
    Result r;
    r.out.assign(c.B * c.H * c.N * c.E, 0);
    for (auto* values : {&r.lse, &r.entropy, &r.peak, &r.distance}) values->assign(c.B * c.H * c.N, 0);
    r.key_mass.assign(c.H * c.M, 0);
    r.dq.assign(c.q.size(), 0);
    r.dk.assign(c.k.size(), 0);
    r.dv.assign(c.v.size(), 0);
    r.logit_max.assign(c.B * c.H * c.N, hidden);
    r.groups.assign(c.B * c.H * c.N * c.group_count, 0);
    r.contributed_keys.assign(c.B * c.H * c.M, 0);
    r.contributed_map.assign(c.B * c.H * c.bins * c.bins, 0);
    std::vector<double> logits(c.M);
    std::vector<double> slopes(c.M);  // of the softcap
    std::vector<double> weights(c.M);
    for (int64_t b = 0; b < c.B; b++)
        for (int64_t h = 0; h < c.H; h++)
            for (int64_t i = 0; i < c.N; i++) {
                const int64_t row = (b * c.H + h) * c.N + i;
                const int64_t first_key = (b * c.G + h / (c.H / c.G)) * c.M;
                const double* q = c.q.data() + row * c.D;
                double largest = hidden;
                for (int64_t j = 0; j < c.M; j++) {
                    double s = c.scale * dot(q, c.k.data() + (first_key + j) * c.D, c.D);
                    slopes[j] = 1;
                    if (c.softcap > 0) {
                        const double tanh = std::tanh(s / c.softcap);
                        s = c.softcap * tanh;
                        slopes[j] = 1 - tanh * tanh;
                    }
                    if (!c.bias.empty()) s += c.bias[i * c.M + j];
                    if (!c.table.empty()) s += c.table[h * (c.N + c.M) + j - i + c.N];
                    if (!c.lo.empty() && j < c.lo[i]) s = hidden;
                    if (!c.hi.empty() && j >= c.hi[i]) s = hidden;
                    if (!c.mask.empty() && !c.mask[i * c.M + j]) s = hidden;
                    logits[j] = s;
                    largest = std::max(largest, s);
                }
                const double peak = largest;
                r.logit_max[row] = peak;
                if (!c.sinks.empty()) largest = std::max(largest, c.sinks[h]);
                if (largest == hidden) continue;  // a row that sees nothing: zeros

                double sum = c.sinks.empty() ? 0 : std::exp(c.sinks[h] - largest);
                for (int64_t j = 0; j < c.M; j++) sum += std::exp(logits[j] - largest);
                const double lse = largest + std::log(sum);
                r.lse[row] = lse;
                r.peak[row] = std::exp(peak - lse);
                double entropy = 0;
                if (!c.sinks.empty()) entropy -= std::exp(c.sinks[h] - lse) * (c.sinks[h] - lse);
                for (int64_t j = 0; j < c.M; j++) {
                    weights[j] = std::exp(logits[j] - lse);
                    if (weights[j] > 0) entropy -= weights[j] * (logits[j] - lse);
                    r.distance[row] += weights[j] * std::abs(static_cast<double>(j - i - (c.M - c.N)));
                    r.key_mass[h * c.M + j] += weights[j];
                    for (int64_t f = 0; f < c.E; f++)
                        r.out[row * c.E + f] += weights[j] * c.v[(first_key + j) * c.E + f];
                }
                r.entropy[row] = entropy;
                for (int64_t j = 0; j < c.M && c.group_count; j++) {
                    const int64_t group = c.key_groups[b * c.M + j];
                    if (group >= 0) r.groups[row * c.group_count + group] += weights[j];
                }

                const double* grad = c.grad_out.data() + row * c.E;
                const double delta = dot(grad, r.out.data() + row * c.E, c.E);
                for (int64_t j = 0; j < c.M; j++) {
                    const double grad_weight = dot(grad, c.v.data() + (first_key + j) * c.E, c.E);
                    const double contribution = weights[j] * grad_weight;
                    r.contributed_keys[(b * c.H + h) * c.M + j] += contribution;
                    const int64_t cell = i * c.bins / c.N * c.bins + j * c.bins / c.M;
                    if (c.bins > 0) r.contributed_map[(b * c.H + h) * c.bins * c.bins + cell] += contribution;
                    double dlogit = weights[j] * (grad_weight - delta);
                    if (!c.grad_entropy.empty() && weights[j] > 0)
                        dlogit -= c.grad_entropy[row] * weights[j] * (logits[j] - lse + entropy);
                    if (!c.grad_logit_max.empty() && logits[j] == peak && peak > hidden) dlogit += c.grad_logit_max[row];
                    const double ds = dlogit * slopes[j] * c.scale;
                    for (int64_t t = 0; t < c.D; t++) {
                        r.dq[row * c.D + t] += ds * c.k[(first_key + j) * c.D + t];
                        r.dk[(first_key + j) * c.D + t] += ds * q[t];
                    }
                    for (int64_t f = 0; f < c.E; f++) r.dv[(first_key + j) * c.E + f] += weights[j] * grad[f];
                }
            }
    return r;
}

}  // namespace plain
