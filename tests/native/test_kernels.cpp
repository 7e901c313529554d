// Compares the kernels of every instruction set that this machine can run with plain loops: forward, backward,
// observables, the second pass, and linear maps. Needs no Python, so it also runs under an emulator of another CPU.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>

#include "kernels.h"
#include "plain_attention.h"

#define REGARD_ISA_NAMESPACE test_support
#include "half_precision.h"

using namespace regard;

namespace {

int passed = 0;
int failed = 0;

// Numbers in the dtype of a call.
class Tensor {
public:
    Tensor() = default;
    Tensor(Dtype dtype, const std::vector<double>& values) : dtype_(dtype), count_(values.size()) {
        bytes_.resize(count_ * bytes_per_element(dtype) + 1);
        for (size_t t = 0; t < count_; t++) {
            const auto x = static_cast<float>(values[t]);
            test_support::from_float32(&x, bytes_.data() + t * bytes_per_element(dtype), dtype, 1);
        }
    }

    void* data() { return bytes_.data(); }
    void forget() { std::fill(bytes_.begin(), bytes_.end(), static_cast<char>(0xff)); }  // every number becomes NaN
    std::vector<double> values() const {
        std::vector<double> result(count_);
        for (size_t t = 0; t < count_; t++) {
            float x;
            test_support::to_float32(bytes_.data() + t * bytes_per_element(dtype_), dtype_, &x, 1);
            result[t] = x;
        }
        return result;
    }

private:
    Dtype dtype_ = Dtype::float32;
    size_t count_ = 0;
    std::vector<char> bytes_;
};

// A contiguous tensor [B, H, rows, columns].
TensorView view(void* data, int64_t heads, int64_t rows, int64_t columns) {
    return {data, heads * rows * columns, rows * columns, columns, 1};
}

std::vector<double> random_numbers(std::mt19937& random, int64_t count) {
    std::normal_distribution<double> normal;
    std::vector<double> values(count);
    for (double& x : values) x = normal(random);
    return values;
}

template <class T>
std::vector<double> as_double(const std::vector<T>& values) {
    return {values.begin(), values.end()};
}

struct Check {
    std::string name;
    double tolerance;  // relative to 1 + the largest expected number
    bool fine = true;

    void compare(const char* what, const std::vector<double>& found, const std::vector<double>& expected) {
        double largest = 1;
        for (double x : expected)
            if (std::isfinite(x)) largest = std::max(largest, 1 + std::abs(x));
        for (size_t t = 0; t < expected.size(); t++) {
            if (found[t] == expected[t]) continue;  // also −inf
            if (std::abs(found[t] - expected[t]) <= tolerance * largest) continue;  // false for NaN
            std::printf("%s: %s[%zu] must be %.9g, got %.9g\n", name.c_str(), what, t, expected[t], found[t]);
            fine = false;
            return;
        }
    }

    void finish() { (fine ? passed : failed)++; }
};

struct Options {
    const char* name;
    bool causal, mask, bias, table, sinks, softcap;
};

constexpr Options kOptions[] = {
    {"plain", false, false, false, false, false, false}, {"causal", true, false, false, false, false, false},
    {"mask", false, true, false, false, false, false},   {"bias", false, false, true, false, false, false},
    {"table", true, false, false, true, false, false},   {"sinks", false, false, false, false, true, true},
    {"all", true, true, true, true, true, true},
};

constexpr int64_t kSizes[][6] = {
    // H, G, N, M, D, E: few rows, panels with and without empty lanes, several blocks of keys, odd widths
    {1, 1, 1, 1, 1, 1},    {4, 2, 1, 300, 64, 64},  {2, 1, 3, 70, 33, 17},   {1, 1, 7, 65, 8, 5},
    {2, 2, 16, 16, 64, 64}, {2, 1, 17, 130, 16, 96}, {1, 1, 33, 33, 31, 2},   {3, 3, 64, 64, 64, 64},
    {2, 2, 65, 129, 40, 72}, {1, 1, 130, 201, 64, 130}, {1, 1, 20, 2100, 24, 36},
};

plain::Call random_call(std::mt19937& random, const int64_t (&sizes)[6], const Options& options, Dtype dtype) {
    plain::Call c;
    c.B = 1 + random() % 2;
    c.H = sizes[0];
    c.G = sizes[1];
    c.N = sizes[2];
    c.M = sizes[3];
    c.D = sizes[4];
    c.E = sizes[5];
    const auto rounded = [&](int64_t count) { return Tensor(dtype, random_numbers(random, count)).values(); };
    c.q = rounded(c.B * c.H * c.N * c.D);
    c.k = rounded(c.B * c.G * c.M * c.D);
    c.v = rounded(c.B * c.G * c.M * c.E);
    c.grad_out = rounded(c.B * c.H * c.N * c.E);
    // Runs of keys and single ones; some keys are in no group, and the last group is empty.
    c.group_count = 5;
    for (int64_t t = 0; t < c.B * c.M; t++) {
        const bool continues = t % c.M && random() % 2;
        c.key_groups.push_back(continues ? c.key_groups.back() : static_cast<int64_t>(random() % 5) - 1);
    }
    c.scale = 1 / std::sqrt(static_cast<double>(c.D));
    if (options.causal)
        for (int64_t i = 0; i < c.N; i++) {
            c.lo.push_back(std::max<int64_t>(0, i - 90));
            c.hi.push_back(std::clamp<int64_t>(i + 1 + c.M - c.N, 0, c.M));
        }
    const auto rounded_float = [&](int64_t count) {
        return Tensor(Dtype::float32, random_numbers(random, count)).values();
    };
    if (options.mask)
        for (int64_t t = 0; t < c.N * c.M; t++) c.mask.push_back(random() % 3 > 0);
    if (options.bias) c.bias = rounded_float(c.N * c.M);
    if (options.table) c.table = rounded_float(c.H * (c.N + c.M));
    if (options.sinks) c.sinks = rounded_float(c.H);
    if (options.softcap) c.softcap = 3;
    c.grad_entropy = rounded_float(c.B * c.H * c.N);
    c.grad_logit_max = rounded_float(c.B * c.H * c.N);
    c.bins = 5;
    return c;
}

// Runs all passes of one call.
void check_attention(const Kernels& kernels, plain::Call& c, Dtype dtype, Check& check) {
    const plain::Result expected = plain::attention(c);
    Tensor q(dtype, c.q);
    Tensor k(dtype, c.k);
    Tensor v(dtype, c.v);
    Tensor grad_out(dtype, c.grad_out);
    Tensor out(dtype, expected.out);
    const int64_t rows = c.B * c.H * c.N;
    std::vector<double> row_max(rows);
    std::vector<double> row_sum(rows);
    std::vector<float> bias(c.bias.begin(), c.bias.end());
    std::vector<float> table(c.table.begin(), c.table.end());
    std::vector<float> sinks(c.sinks.begin(), c.sinks.end());
    std::vector<int64_t> positions(std::max(c.N, c.M));
    for (size_t t = 0; t < positions.size(); t++) positions[t] = static_cast<int64_t>(t);

    AttentionCall call;
    call.B = c.B;
    call.H = c.H;
    call.G = c.G;
    call.N = c.N;
    call.M = c.M;
    call.D = c.D;
    call.E = c.E;
    call.dtype = dtype;
    call.q = view(q.data(), c.H, c.N, c.D);
    call.k = view(k.data(), c.G, c.M, c.D);
    call.v = view(v.data(), c.G, c.M, c.E);
    call.out = view(out.data(), c.H, c.N, c.E);
    call.row_max = row_max.data();
    call.row_sum = row_sum.data();
    if (!c.lo.empty()) call.lo = c.lo.data();
    if (!c.hi.empty()) call.hi = c.hi.data();
    if (!c.mask.empty()) call.mask = {c.mask.data(), 0, 0, c.M, 1};
    if (!bias.empty()) call.bias = {bias.data(), 0, 0, c.M, 1};
    if (!sinks.empty()) call.sinks = sinks.data();
    if (!table.empty()) {
        RelativeTerm term;
        term.table = {table.data(), 0, c.N + c.M, 0, 1};
        term.columns = c.N + c.M;
        term.first_offset = -c.N;
        term.query_positions = positions.data();
        term.key_positions = positions.data();
        term.is_toeplitz = true;
        call.terms.push_back(term);
    }
    call.scale = c.scale;
    call.softcap = c.softcap;
    call.threads = 2;

    out.forget();
    if (!kernels.forward(call)) check.compare("finite", {0}, {1});
    const std::vector<double> unobserved = out.values();
    check.compare("out", unobserved, expected.out);
    std::vector<double> lse(rows);
    for (int64_t row = 0; row < rows; row++) lse[row] = row_sum[row] > 0 ? row_max[row] + std::log(row_sum[row]) : 0;
    check.compare("lse", lse, expected.lse);

    // Measuring changes no bit of the output.
    std::vector<std::vector<float>> measured(6, std::vector<float>(rows));
    std::vector<int64_t> peak_at(rows);
    std::vector<int64_t> visible(rows);
    std::vector<int64_t> map(c.H * 25);
    std::vector<float> logit_max(rows);
    std::vector<float> groups(rows * c.group_count);
    Observables wanted;
    wanted.logit_max = logit_max.data();
    wanted.group_count = c.group_count;
    wanted.groups = groups.data();
    wanted.key_groups = c.key_groups.data();
    wanted.key_groups_batch_stride = c.M;
    wanted.entropy = measured[0].data();
    wanted.peak = measured[1].data();
    wanted.offset = measured[2].data();
    wanted.distance = measured[3].data();
    wanted.sink = measured[4].data();
    wanted.local = measured[5].data();
    wanted.peak_at = peak_at.data();
    wanted.visible = visible.data();
    wanted.query_offset = c.M - c.N;
    wanted.sink_keys = 1;
    wanted.local_radius = 2;
    wanted.map_size = 5;
    wanted.map = map.data();
    call.observables = &wanted;
    out.forget();
    if (!kernels.forward(call)) check.compare("finite when observed", {0}, {1});
    call.observables = nullptr;
    if (out.values() != unobserved) check.compare("the same output when observed", {0}, {1});
    check.compare("entropy", as_double(measured[0]), expected.entropy);
    check.compare("peak", as_double(measured[1]), expected.peak);
    Check distances = check;
    distances.tolerance = std::max(check.tolerance, 1e-4);
    distances.compare("distance", as_double(measured[3]), expected.distance);
    check.fine = distances.fine;
    check.compare("largest logits", as_double(logit_max), expected.logit_max);
    check.compare("groups", as_double(groups), expected.groups);

    std::vector<uint8_t> counted(rows, 1);
    std::vector<int64_t> key_mass(c.H * c.M);
    SecondPass second;
    second.counted = counted.data();
    second.key_mass = key_mass.data();
    kernels.second_pass(call, second);
    std::vector<double> mass = as_double(key_mass);
    for (double& x : mass) x *= 0x1p-32;
    check.compare("key mass", mass, expected.key_mass);

    std::vector<float> dq(c.q.size());
    std::vector<float> dk(c.k.size());
    std::vector<float> dv(c.v.size());
    std::vector<float> delta(rows);
    Gradients gradients;
    gradients.grad_out = view(grad_out.data(), c.H, c.N, c.E);
    gradients.dq = dq.data();
    gradients.dk = dk.data();
    gradients.dv = dv.data();
    gradients.delta = delta.data();
    gradients.terms.resize(call.terms.size());
    const std::vector<float> grad_entropy(c.grad_entropy.begin(), c.grad_entropy.end());
    const std::vector<float> grad_logit_max(c.grad_logit_max.begin(), c.grad_logit_max.end());
    std::vector<float> contributed_keys(c.B * c.H * c.M);
    std::vector<float> contributed_map(c.B * c.H * c.bins * c.bins);
    gradients.grad_entropy = grad_entropy.data();
    gradients.entropy = wanted.entropy;
    gradients.grad_logit_max = grad_logit_max.data();
    gradients.peak_at = peak_at.data();
    gradients.contributed_keys = contributed_keys.data();
    gradients.contributed_map = contributed_map.data();
    gradients.contributed_bins = c.bins;
    if (!kernels.backward(call, gradients)) check.compare("finite gradients", {0}, {1});
    check.compare("dq", as_double(dq), expected.dq);
    check.compare("dk", as_double(dk), expected.dk);
    check.compare("dv", as_double(dv), expected.dv);
    check.compare("contributions of keys", as_double(contributed_keys), expected.contributed_keys);
    check.compare("contributions by cell", as_double(contributed_map), expected.contributed_map);
}

void check_linear(const Kernels& kernels, std::mt19937& random, Dtype dtype, Check& check) {
    const int64_t rows = 1 + random() % 8;
    const int64_t inputs = 1 + random() % 200;
    const int64_t outputs[2] = {static_cast<int64_t>(1 + random() % 300), static_cast<int64_t>(random() % 90)};
    Tensor x(dtype, random_numbers(random, rows * inputs));
    Tensor weights[2];
    LinearWeights matrices[2];
    for (int m = 0; m < 2; m++) {
        weights[m] = Tensor(dtype, random_numbers(random, outputs[m] * inputs));
        matrices[m] = {weights[m].data(), nullptr, outputs[m], inputs};
    }
    std::vector<double> expected;
    for (int64_t i = 0; i < rows; i++)
        for (int m = 0; m < 2; m++)
            for (int64_t o = 0; o < outputs[m]; o++)
                expected.push_back(
                    plain::dot(x.values().data() + i * inputs, weights[m].values().data() + o * inputs, inputs));
    Tensor y(dtype, expected);
    std::memset(y.data(), 0, expected.size() * bytes_per_element(dtype));
    kernels.linear({x.data(), y.data(), rows, inputs, inputs, matrices, 2, dtype, 2});
    check.compare("linear", y.values(), expected);
}

}  // namespace

int main() {
    const struct {
        Dtype dtype;
        const char* name;
        double tolerance;  // a few roundings
    } dtypes[] = {{Dtype::float32, "float32", 3e-5}, {Dtype::bfloat16, "bfloat16", 0x1p-6}, {Dtype::float16, "float16", 0x1p-9}};
    for (InstructionSet set : supported_instruction_sets()) {
        const Kernels& kernels = kernels_for(set);
        std::mt19937 random(1);
        const int before = passed + failed;
        for (const auto& [dtype, dtype_name, tolerance] : dtypes) {
            for (const Options& options : kOptions)
                for (const auto& sizes : kSizes) {
                    std::string name = std::string(name_of(set)) + " " + dtype_name + " " + options.name;
                    for (int64_t size : sizes) name += " " + std::to_string(size);
                    Check check{name, tolerance};
                    plain::Call call = random_call(random, sizes, options, dtype);
                    check_attention(kernels, call, dtype, check);
                    check.finish();
                }
            for (int t = 0; t < 5; t++) {
                Check check{std::string(name_of(set)) + " " + dtype_name, tolerance};
                check_linear(kernels, random, dtype, check);
                check.finish();
            }
        }
        std::printf("%s: %d cases\n", name_of(set), passed + failed - before);
    }
    std::printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}
