// The Python module regard._native. This is the only file that knows nanobind.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "call.h"
#include "cpu.h"
#include "kernels.h"
#include "threads.h"

namespace nb = nanobind;
using namespace regard;

namespace {

template <class T>
T* pointer(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

using Four = std::array<int64_t, 4>;

// A dimension of size 1 broadcasts: its stride is 0.
Tensor tensor(uintptr_t data, const Four& sizes, const Four& strides) {
    const auto step = [&](int t) { return sizes[t] == 1 ? 0 : strides[t]; };
    return {pointer<void>(data), step(0), step(1), step(2), step(3)};
}

// A term is on a line if keys stand at 0, 1, 2 … and queries at offset, offset + 1 …
void find_line(const Call& c, Term& t) {
    t.line = c.n == 0 || t.query_at[0] != kNowhere;
    for (int64_t j = 0; t.line && j < c.m; j++) t.line = t.key_at[j] == j;
    for (int64_t i = 0; t.line && i < c.n; i++) t.line = t.query_at[i] == t.query_at[0] + i;
    t.offset = t.line && c.n > 0 ? t.query_at[0] : 0;
}

InstructionSet named(const std::string& wanted) {
    for (auto set : instruction_sets())
        if (wanted == name(set)) return set;
    throw std::invalid_argument("this machine cannot run the instruction set " + wanted);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "The compiled part of regard. Use it through regard.kernels.native.";
    may_use_threads();  // remembers the process that loaded the module: a child of fork() runs on one thread

    m.def(
        "instruction_sets",
        [] {
            std::vector<std::string> names;
            for (auto set : instruction_sets()) names.emplace_back(name(set));
            return names;
        },
        "Names of the instruction sets this machine can run, weakest first, best last.");

    // std::invalid_argument reaches Python as ValueError.
    m.def(
        "chosen", [] { return name(chosen_instruction_set()); },
        "Name of the instruction set in use: the best one, or the one that REGARD_ISA names.");

    // Tensors are given as an address and strides in elements. The caller keeps them alive and has checked them.
    nb::class_<Call>(m, "Call")
        .def("__init__",
             [](Call* c, int dtype, double scale, double softcap, double dropout, int64_t seed, int threads,
                uintptr_t q, const Four& q_sizes, const Four& q_strides, uintptr_t k, const Four& k_sizes,
                const Four& k_strides, uintptr_t v, const Four& v_sizes, const Four& v_strides, uintptr_t out,
                const Four& out_strides, uintptr_t high, uintptr_t total) {
                 new (c) Call();
                 c->B = q_sizes[0], c->H = q_sizes[1], c->G = k_sizes[1];
                 c->n = q_sizes[2], c->m = k_sizes[2], c->d = q_sizes[3], c->e = v_sizes[3];
                 c->dtype = static_cast<Dtype>(dtype);
                 c->scale = scale, c->softcap = softcap, c->dropout = dropout, c->seed = seed, c->threads = threads;
                 c->q = tensor(q, q_sizes, q_strides), c->k = tensor(k, k_sizes, k_strides);
                 c->v = tensor(v, v_sizes, v_strides);
                 c->out = tensor(out, {c->B, c->H, c->n, c->e}, out_strides);
                 c->high = pointer<double>(high), c->total = pointer<double>(total);
             })
        .def("mask", [](Call& c, uintptr_t data, const Four& s, const Four& by) { c.mask = tensor(data, s, by); })
        .def("bias", [](Call& c, uintptr_t data, const Four& s, const Four& by) { c.bias = tensor(data, s, by); })
        .def("best", [](Call& c, uintptr_t data) { c.best = pointer<float>(data); })
        .def("sinks", [](Call& c, uintptr_t data) { c.sinks = pointer<float>(data); })
        .def("lo", [](Call& c, uintptr_t data, int64_t b) { c.lo = pointer<int64_t>(data), c.lo_b = b; })
        .def("hi", [](Call& c, uintptr_t data, int64_t b) { c.hi = pointer<int64_t>(data), c.hi_b = b; })
        .def("term",
             [](Call& c, uintptr_t table, int64_t b, int64_t h, int64_t i, int64_t columns, uintptr_t query_at,
                uintptr_t key_at, int64_t first) {
                 Term t;
                 t.table = Tensor{pointer<void>(table), b, h, i, 1};
                 t.columns = columns, t.first = first;
                 t.query_at = pointer<int64_t>(query_at), t.key_at = pointer<int64_t>(key_at);
                 find_line(c, t);
                 c.terms.push_back(t);
             })
        .def("one_thread", [](Call& c) { c.threads = 1; })
        .def("on_line", [](const Call& c, size_t t) { return c.terms[t].line && c.terms[t].table.i == 0; },
             "Whether the t-th term shares one vector by i - j + m with the others on a line.")
        .def(
            "forward",
            [](Call& c, const std::string& set, const std::vector<uintptr_t>& rows, const std::vector<int64_t>& what) {
                Watch w;
                if (!rows.empty()) {
                    float** to[] = {&w.entropy, &w.peak, &w.offset, &w.distance, &w.sink, &w.local};
                    for (size_t t = 0; t < 6; t++) *to[t] = pointer<float>(rows[t]);
                    w.peak_at = pointer<int64_t>(rows[6]), w.visible = pointer<int64_t>(rows[7]);
                    w.map = pointer<int64_t>(rows[8]), w.real = pointer<uint8_t>(rows[9]);
                    w.shift = what[0], w.sinks = what[1], w.radius = what[2], w.bins = what[3], w.real_b = what[4];
                    c.watch = &w;
                }
                const auto& kernels = kernels_for(named(set));
                nb::gil_scoped_release release;
                const bool finite = kernels.forward(c);
                c.watch = nullptr;
                return finite;
            },
            "Fills out, highs and totals, and row values and the map where their addresses are given; False if an output is "
            "not finite.")
        .def(
            "look",
            [](const Call& c, const std::string& set, uintptr_t counted, uintptr_t key_mass, uintptr_t profile,
               uintptr_t profile_rows, int64_t radius, int64_t shift, int64_t top, uintptr_t top_weights,
               uintptr_t top_at) {
                Look what;
                what.counted = pointer<uint8_t>(counted), what.key_mass = pointer<int64_t>(key_mass);
                what.profile = pointer<int64_t>(profile), what.profile_rows = pointer<int64_t>(profile_rows);
                what.radius = radius, what.shift = shift, what.top = top;
                what.top_weights = pointer<float>(top_weights), what.top_at = pointer<int64_t>(top_at);
                const auto& kernels = kernels_for(named(set));
                nb::gil_scoped_release release;
                kernels.look(c, what);
            },
            "Measures key mass, profile and the largest weights from highs and totals; an address of 0 leaves one out.")
        .def(
            "bins",
            [](const Call& c, const std::string& set, int64_t bins, uintptr_t edges, uintptr_t masses) {
                Look what;
                what.bins = bins, what.edges = pointer<int64_t>(edges), what.masses = pointer<float>(masses);
                const auto& kernels = kernels_for(named(set));
                nb::gil_scoped_release release;
                kernels.look(c, what);
            },
            "Adds each row's weight on each bin of keys, from highs and totals, to masses, which start at 0.")
        .def(
            "backward",
            [](const Call& c, const std::string& set, const std::vector<int64_t>& grad, uintptr_t dq, uintptr_t dk,
               uintptr_t dv, uintptr_t delta, uintptr_t line, const std::vector<int64_t>& bias,
               const std::vector<uintptr_t>& terms) {
                Gradients g;
                g.grad = Tensor{pointer<void>(grad[0]), grad[1], grad[2], grad[3], 1};
                g.q = pointer<float>(dq), g.k = pointer<float>(dk), g.v = pointer<float>(dv);
                g.delta = pointer<float>(delta), g.line = pointer<float>(line);
                if (!bias.empty()) g.bias = Tensor{pointer<void>(bias[0]), bias[1], bias[2], bias[3], bias[4]};
                for (auto address : terms) g.terms.push_back(pointer<float>(address));
                const auto& kernels = kernels_for(named(set));
                nb::gil_scoped_release release;
                return kernels.backward(c, g);
            },
            "Adds to the gradients, which start at 0; False if one is not finite.");

    m.def(
        "linear",
        [](const std::string& set, int dtype, uintptr_t x, int64_t rows, int64_t in, int64_t x_stride,
           const std::vector<std::array<int64_t, 4>>& parts, uintptr_t y, int threads) {
            Linear c{pointer<void>(x), pointer<void>(y), rows, in, x_stride, {}, static_cast<Dtype>(dtype), threads};
            for (const auto& part : parts)
                c.parts.push_back({pointer<void>(part[0]), pointer<void>(part[1]), part[2], part[3]});
            const auto& kernels = kernels_for(named(set));
            nb::gil_scoped_release release;
            kernels.linear(c);
        },
        "y = x [W₁ᵀ W₂ᵀ …] + biases for a few rows of x; a part is (weight, bias or 0, outputs, stride).");

    m.def(
        "norm",
        [](const std::string& set, int dtype, uintptr_t x, int64_t rows, int64_t width, int64_t x_stride,
           uintptr_t weight, uintptr_t bias, uintptr_t y, double eps, bool centred, int threads) {
            const Norm c{pointer<void>(x), pointer<void>(weight), pointer<void>(bias), pointer<void>(y), rows, width,
                         x_stride, eps, centred, static_cast<Dtype>(dtype), threads};
            const auto& kernels = kernels_for(named(set));
            nb::gil_scoped_release release;
            kernels.norm(c);
        },
        "LayerNorm (centred) or RMSNorm of every row.");

    m.def(
        "turn",
        [](const std::string& set, int dtype, uintptr_t x, const Four& sizes, const Four& strides, uintptr_t y,
           uintptr_t cos, uintptr_t sin, int64_t width, int64_t wave_b, bool halves) {
            const Turn c{tensor(x, sizes, strides), pointer<void>(y), pointer<float>(cos), pointer<float>(sin),
                         sizes[0], sizes[1], sizes[2], sizes[3], width, wave_b, halves, static_cast<Dtype>(dtype)};
            const auto& kernels = kernels_for(named(set));
            nb::gil_scoped_release release;
            kernels.turn(c);
        },
        "Turns pairs of features by the angles whose cosines and sines are given.");

    // A norm is (weight, bias or 0, centred), a part as in `linear`.
    using Norm3 = std::array<int64_t, 3>;
    using Part4 = std::array<int64_t, 4>;
    nb::class_<Step>(m, "Step")
        .def("__init__",
             [](Step* s, int dtype, const std::array<int64_t, 5>& sizes, const std::vector<Norm3>& norms,
                const std::vector<double>& eps, const std::vector<Part4>& parts, int64_t ups, int activation,
                double scale, double softcap, uintptr_t sinks, int64_t turned, bool halves) {
                 new (s) Step();
                 s->dtype = static_cast<Dtype>(dtype);
                 s->width = sizes[0], s->heads = sizes[1], s->kv_heads = sizes[2], s->d = sizes[3], s->e = sizes[4];
                 Step::NormPart* to[] = {&s->first, &s->second, &s->q_norm, &s->k_norm};
                 for (size_t t = 0; t < 4; t++)
                     *to[t] = {pointer<void>(norms[t][0]), pointer<void>(norms[t][1]), eps[t], norms[t][2] != 0};
                 const auto part = [&](size_t t) {
                     return Linear::Part{pointer<void>(parts[t][0]), pointer<void>(parts[t][1]), parts[t][2],
                                         parts[t][3]};
                 };
                 s->qkv = {part(0), part(1), part(2)}, s->out = part(3), s->down = part(4);
                 for (int64_t t = 0; t < ups; t++) s->up.push_back(part(5 + t));
                 s->gated = ups == 2, s->activation = static_cast<Activation>(activation);
                 s->scale = scale, s->softcap = softcap, s->sinks = pointer<float>(sinks);
                 s->turned = turned, s->halves = halves;
             })
        .def(
            "run",
            [](const Step& s, const std::string& set, uintptr_t x, uintptr_t y, int64_t rows, uintptr_t cos,
               uintptr_t sin, uintptr_t k, const Four& k_strides, uintptr_t v, const Four& v_strides, int64_t m, int64_t seen, int threads) {
                Step c = s;  // threads of Python may run one block at once
                c.x = pointer<void>(x), c.y = pointer<void>(y), c.rows = rows;
                c.cos = pointer<float>(cos), c.sin = pointer<float>(sin);
                c.k = {pointer<void>(k), k_strides[0], k_strides[1], k_strides[2], 1};
                c.v = {pointer<void>(v), v_strides[0], v_strides[1], v_strides[2], 1};
                c.m = m, c.seen = seen, c.threads = threads;
                const auto& kernels = kernels_for(named(set));
                nb::gil_scoped_release release;
                return kernels.step(c);
            },
            "A new token of each row through the block, its key and value into the cache; False if not finite.");
}
