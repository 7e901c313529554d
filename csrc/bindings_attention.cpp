// Python bindings of the attention kernels. All tensors are checked against q, k and v before a kernel runs.
#include <cmath>
#include <limits>
#include <stdexcept>

#include "tensor_arguments.h"

namespace regard {
namespace {

using namespace nb::literals;

// An AttentionCall, and the tensors it points to, which this object keeps alive.
class AttentionBinding {
public:
    AttentionBinding(TensorArgument q, TensorArgument k, TensorArgument v, TensorArgument out, double scale,
                     double softcap, double dropout, int64_t seed, int threads) {
        tensors_.reserve(8);
        const TorchTensor q_tensor("q", q);
        q_tensor.require_dimensions(4);
        call_.dtype = q_tensor.float_dtype();
        call_.B = q_tensor.size(0);
        call_.H = q_tensor.size(1);
        call_.N = q_tensor.size(2);
        call_.D = q_tensor.size(3);
        call_.q = input(q, q_tensor);

        const TorchTensor k_tensor("k", k);
        k_tensor.require_shape({kAnySize, kAnySize, kAnySize, call_.D});
        call_.G = k_tensor.size(1);
        call_.M = k_tensor.size(2);
        if (call_.G < 1 || call_.H % call_.G != 0)
            k_tensor.fail("have a number of heads that divides the " + std::to_string(call_.H) + " heads of q, got " +
                          std::to_string(call_.G));
        // Lanes of a vector compare key indices as 32-bit integers, so M must fit.
        if (call_.M > std::numeric_limits<int32_t>::max() - 1024) 
            k_tensor.fail("have fewer than 2^31 − 1024 keys, got " + std::to_string(call_.M));
        k_tensor.require_broadcastable({call_.B, call_.G, call_.M, call_.D});
        call_.k = input(k, k_tensor);

        const TorchTensor v_tensor("v", v);
        v_tensor.require_dimensions(4);
        call_.E = v_tensor.size(3);
        require_batch_of_keys(v_tensor);
        call_.v = input(v, v_tensor);

        const TorchTensor out_tensor("out", out);
        out_tensor.require_shape({call_.B, call_.H, call_.N, call_.E});
        out_tensor.require_own_elements();
        call_.out = input(out, out_tensor);

        if (!(scale >= 0)) throw std::invalid_argument("scale must be at least 0, got " + std::to_string(scale));
        if (!(softcap >= 0)) throw std::invalid_argument("softcap must be at least 0, got " + std::to_string(softcap));
        if (!(dropout >= 0 && dropout <= 1))
            throw std::invalid_argument("dropout must be between 0 and 1, got " + std::to_string(dropout));
        call_.scale = scale;
        call_.softcap = softcap;
        call_.dropout = dropout;
        call_.seed = seed;
        call_.threads = threads;
        if (std::isinf(scale)) {
            hard_max_.resize(call_.B * call_.H * call_.N);
            call_.hard_max = hard_max_.data();
        }
    }

    // call_.hard_max points into this object.
    AttentionBinding(const AttentionBinding&) = delete;

    void set_row_sums(TensorArgument row_max, TensorArgument row_sum) {
        call_.row_max = contiguous_data<double>("row_max", row_max, {call_.B, call_.H, call_.N});
        call_.row_sum = contiguous_data<double>("row_sum", row_sum, {call_.B, call_.H, call_.N});
        has_row_sums_ = true;  // a flag, because without rows the pointers stay null
        keep(row_max);
        keep(row_sum);
    }

    void set_lo(TensorArgument lo) { call_.lo = row_bound("lo", lo, call_.lo_batch_stride); }

    void set_hi(TensorArgument hi) { call_.hi = row_bound("hi", hi, call_.hi_batch_stride); }

    void set_mask(TensorArgument mask) {
        const TorchTensor tensor("mask", mask);
        tensor.require_type(ElementType::boolean);
        tensor.require_broadcastable({call_.B, call_.H, call_.N, call_.M});
        call_.mask = tensor.view();
        keep(mask);
    }

    void set_bias(TensorArgument bias) {
        const TorchTensor tensor("bias", bias);
        tensor.require_type(ElementType::float32);
        tensor.require_broadcastable({call_.B, call_.H, call_.N, call_.M});
        call_.bias = tensor.view();
        keep(bias);
    }

    void set_sinks(TensorArgument sinks) {
        call_.sinks = contiguous_data<float>("sinks", sinks, {call_.H});
        keep(sinks);
    }

    void add_term(TensorArgument table, TensorArgument query_positions, TensorArgument key_positions,
                  int64_t first_offset) {
        const TorchTensor tensor("table", table);
        tensor.require_type(ElementType::float32);
        tensor.require_broadcastable({call_.B, call_.H, call_.N, kAnySize});
        tensor.require_contiguous_rows();
        if (tensor.size(3) < 1) tensor.fail("have at least 1 column, got 0");
        RelativeTerm term;
        term.table = tensor.view();
        term.per_row = tensor.size(2) != 1;
        term.columns = tensor.size(3);
        term.first_offset = first_offset;
        term.query_positions = contiguous_data<int64_t>("query_positions", query_positions, {call_.N});
        term.key_positions = contiguous_data<int64_t>("key_positions", key_positions, {call_.M});
        find_toeplitz(term);
        call_.terms.push_back(term);
        keep(table);
        keep(query_positions);
        keep(key_positions);
    }

    bool is_toeplitz(size_t term) const {
        if (term >= call_.terms.size())
            throw std::invalid_argument("term must be less than " + std::to_string(call_.terms.size()) + ", got " +
                                        std::to_string(term));
        return call_.terms[term].is_toeplitz;
    }

    bool forward(const char* instruction_set) const {
        const Kernels& kernels = kernels_named(instruction_set);
        nb::gil_scoped_release release;
        return kernels.forward(call_);
    }

    bool forward_observed(const char* instruction_set, TensorArgument logit_max, TensorArgument entropy,
                          TensorArgument peak, TensorArgument offset, TensorArgument distance, TensorArgument sink,
                          TensorArgument local, TensorArgument peak_at, TensorArgument visible, TensorArgument map,
                          TensorArgument groups, TensorArgument key_groups, TensorArgument real_queries,
                          int64_t query_offset, int64_t sink_keys, int64_t local_radius) const {
        const Kernels& kernels = kernels_named(instruction_set);
        require_query_offset(query_offset);
        const std::initializer_list<int64_t> rows = {call_.B, call_.H, call_.N};
        Observables wanted;
        wanted.logit_max = contiguous_data<float>("logit_max", logit_max, rows);
        wanted.entropy = contiguous_data<float>("entropy", entropy, rows);
        wanted.peak = contiguous_data<float>("peak", peak, rows);
        wanted.offset = contiguous_data<float>("offset", offset, rows);
        wanted.distance = contiguous_data<float>("distance", distance, rows);
        wanted.sink = contiguous_data<float>("sink", sink, rows);
        wanted.local = contiguous_data<float>("local", local, rows);
        wanted.peak_at = contiguous_data<int64_t>("peak_at", peak_at, rows);
        wanted.visible = contiguous_data<int64_t>("visible", visible, rows);
        const TorchTensor map_tensor("map", map);
        map_tensor.require_dimensions(3);
        wanted.map_size = map_tensor.size(1);
        wanted.map = contiguous_data<int64_t>("map", map, {call_.H, wanted.map_size, wanted.map_size});
        if (real_queries.given()) {
            const TorchTensor real("real_queries", real_queries);
            real.require_type(ElementType::boolean);
            real.require_shape({kAnySize, call_.N});
            real.require_contiguous();
            if (real.size(0) != 1 && real.size(0) != call_.B)
                real.fail("have 1 or " + std::to_string(call_.B) + " batch entries, got " +
                          std::to_string(real.size(0)));
            wanted.real_queries = static_cast<const uint8_t*>(real.data());
            wanted.real_queries_batch_stride = real.size(0) == 1 ? 0 : call_.N;
        }
        if (groups.given()) set_groups(groups, key_groups, wanted);
        wanted.query_offset = query_offset;
        wanted.sink_keys = sink_keys;
        wanted.local_radius = local_radius;
        // A copy: several Python threads may run this call at the same time, each with its own observables.
        AttentionCall observed = call_;
        observed.observables = &wanted;
        nb::gil_scoped_release release;
        return kernels.forward(observed);
    }

    void second_pass(const char* instruction_set, TensorArgument counted, int64_t query_offset,
                     TensorArgument key_mass, TensorArgument profile, TensorArgument profile_rows, TensorArgument top,
                     TensorArgument top_at) const {
        const Kernels& kernels = kernels_named(instruction_set);
        require_row_sums();
        require_query_offset(query_offset);
        SecondPass wanted;
        wanted.counted = contiguous_data<uint8_t>("counted", counted, {call_.B, call_.H, call_.N});
        wanted.query_offset = query_offset;
        if (key_mass.given()) wanted.key_mass = contiguous_data<int64_t>("key_mass", key_mass, {call_.H, call_.M});
        if (profile.given()) {
            const TorchTensor tensor("profile", profile);
            tensor.require_dimensions(2);
            const int64_t offsets = tensor.size(1);
            if (offsets % 2 != 1) tensor.fail("have an odd number of offsets, got " + std::to_string(offsets));
            wanted.profile_radius = offsets / 2;
            wanted.profile = contiguous_data<int64_t>("profile", profile, {call_.H, offsets});
            wanted.profile_rows = contiguous_data<int64_t>("profile_rows", profile_rows, {call_.H, offsets});
        }
        if (top.given()) {
            const TorchTensor tensor("top", top);
            tensor.require_dimensions(4);
            wanted.top_count = tensor.size(3);
            wanted.top = contiguous_data<float>("top", top, {call_.B, call_.H, call_.N, wanted.top_count});
            wanted.top_at = contiguous_data<int64_t>("top_at", top_at, {call_.B, call_.H, call_.N, wanted.top_count});
        }
        nb::gil_scoped_release release;
        kernels.second_pass(call_, wanted);
    }

    void sum_bins(const char* instruction_set, TensorArgument edges, TensorArgument masses) const {
        const Kernels& kernels = kernels_named(instruction_set);
        require_row_sums();
        SecondPass wanted;
        const TorchTensor edge_tensor("edges", edges);
        edge_tensor.require_dimensions(1);
        if (edge_tensor.size(0) < 2) 
            edge_tensor.fail("have at least 2 elements, got " + std::to_string(edge_tensor.size(0)));
        wanted.bin_count = edge_tensor.size(0) - 1;
        wanted.bin_edges = contiguous_data<int64_t>("edges", edges, {wanted.bin_count + 1});
        require_edges(edge_tensor, wanted);
        wanted.bin_masses = contiguous_data<float>("masses", masses, {call_.B, call_.H, call_.N, wanted.bin_count});
        nb::gil_scoped_release release;
        kernels.second_pass(call_, wanted);
    }

    bool backward(const char* instruction_set, TensorArgument grad_out, TensorArgument dq, TensorArgument dk,
                  TensorArgument dv, TensorArgument delta, TensorArgument toeplitz_grad, TensorArgument bias_grad,
                  nb::sequence term_grads, TensorArgument grad_entropy, TensorArgument entropy,
                  TensorArgument grad_logit_max, TensorArgument peak_at, TensorArgument contributed_keys,
                  TensorArgument contributed_map) const {
        const Kernels& kernels = kernels_named(instruction_set);
        require_row_sums();
        AttentionCall call = call_;
        Gradients gradients;
        const TorchTensor grad_tensor("grad_out", grad_out);
        grad_tensor.require_float_dtype(call.dtype);
        grad_tensor.require_shape({call.B, call.H, call.N, call.E});
        grad_tensor.require_contiguous_rows();
        gradients.grad_out = grad_tensor.view();
        gradients.dq = contiguous_data<float>("dq", dq, {call.B, call.H, call.N, call.D});
        gradients.dk = contiguous_data<float>("dk", dk, {call.B, call.G, call.M, call.D});
        gradients.dv = contiguous_data<float>("dv", dv, {call.B, call.G, call.M, call.E});
        gradients.delta = contiguous_data<float>("delta", delta, {call.B, call.H, call.N});
        if (toeplitz_grad.given())
            gradients.toeplitz =
                contiguous_data<float>("toeplitz_grad", toeplitz_grad, {call.B, call.H, call.N + call.M});
        if (bias_grad.given()) {
            const TorchTensor tensor("bias_grad", bias_grad);
            tensor.require_type(ElementType::float32);
            tensor.require_broadcastable({call.B, call.H, call.N, call.M});
            tensor.require_own_elements();
            gradients.bias = tensor.view();
            // Several heads add to the same element of a broadcast bias. One thread keeps the order of these additions,
            // so that the rounding does not depend on the number of threads.
            if (tensor.size(0) != call.B || tensor.size(1) != call.H) call.threads = 1;
        }
        read_term_gradients(term_grads, gradients);
        const std::initializer_list<int64_t> rows = {call.B, call.H, call.N};
        if (grad_entropy.given()) {
            gradients.grad_entropy = contiguous_data<float>("grad_entropy", grad_entropy, rows);
            gradients.entropy = contiguous_data<float>("entropy", entropy, rows);
        }
        if (grad_logit_max.given()) {
            gradients.grad_logit_max = contiguous_data<float>("grad_logit_max", grad_logit_max, rows);
            gradients.peak_at = contiguous_data<int64_t>("peak_at", peak_at, rows);
        }
        if (contributed_keys.given())
            gradients.contributed_keys =
                contiguous_data<float>("contributed_keys", contributed_keys, {call.B, call.H, call.M});
        if (contributed_map.given()) {
            const TorchTensor tensor("contributed_map", contributed_map);
            tensor.require_dimensions(4);
            if (!contributed_keys.given()) tensor.fail("be given together with contributed_keys");
            gradients.contributed_bins = tensor.size(2);
            gradients.contributed_map =
                contiguous_data<float>("contributed_map", contributed_map,
                                       {call.B, call.H, gradients.contributed_bins, gradients.contributed_bins});
        }
        nb::gil_scoped_release release;
        return kernels.backward(call, gradients);
    }

private:
    void keep(TensorArgument argument) { tensors_.push_back(nb::borrow(argument.object)); }

    // Checks dtype and contiguous rows, keeps the tensor alive, and returns its view.
    TensorView input(TensorArgument argument, const TorchTensor& tensor) {
        tensor.require_float_dtype(call_.dtype);
        tensor.require_contiguous_rows();
        keep(argument);
        TensorView view = tensor.view();
        view.column_stride = 1;
        return view;
    }

    // v must have the heads and the length of k, and the batch size of the call or 1.
    void require_batch_of_keys(const TorchTensor& v) const {
        const int64_t batch = v.size(0) == 1 ? 1 : call_.B;
        v.require_shape({batch, call_.G, call_.M, call_.E});
    }

    const int64_t* row_bound(const char* name, TensorArgument argument, int64_t& batch_stride) {
        const TorchTensor tensor(name, argument);
        tensor.require_type(ElementType::int64);
        tensor.require_shape({kAnySize, call_.N});
        tensor.require_contiguous_rows();
        if (tensor.size(0) != 1 && tensor.size(0) != call_.B)
            tensor.fail("have 1 or " + std::to_string(call_.B) + " batch entries, got " +
                        std::to_string(tensor.size(0)));
        batch_stride = tensor.size(0) == 1 ? 0 : tensor.stride(0);
        keep(argument);
        return static_cast<const int64_t*>(tensor.data());
    }

    // A term is Toeplitz if keys are at 0, 1, 2 … and queries at offset, offset + 1 …, and rows share one table row.
    void find_toeplitz(RelativeTerm& term) const {
        if (term.per_row) return;
        for (int64_t j = 0; j < call_.M; j++)
            if (term.key_positions[j] != j) return;
        for (int64_t i = 0; i < call_.N; i++) {
            const int64_t position = term.query_positions[i];
            if (position == kNoPosition || position != add_positions(term.query_positions[0], i)) return;
        }
        term.is_toeplitz = true;
        term.query_offset = call_.N > 0 ? term.query_positions[0] : 0;
    }

    void require_row_sums() const {
        if (!has_row_sums_) throw std::invalid_argument("row_max and row_sum must be set before this pass");
    }

    void set_groups(TensorArgument groups, TensorArgument key_groups, Observables& wanted) const {
        const TorchTensor tensor("groups", groups);
        tensor.require_dimensions(4);
        wanted.group_count = tensor.size(3);
        wanted.groups =
            contiguous_data<float>("groups", groups, {call_.B, call_.H, call_.N, wanted.group_count});
        const TorchTensor keys("key_groups", key_groups);
        keys.require_type(ElementType::int64);
        keys.require_shape({kAnySize, call_.M});
        keys.require_contiguous();
        if (keys.size(0) != 1 && keys.size(0) != call_.B)
            keys.fail("have 1 or " + std::to_string(call_.B) + " batch entries, got " + std::to_string(keys.size(0)));
        wanted.key_groups = static_cast<const int64_t*>(keys.data());
        wanted.key_groups_batch_stride = keys.size(0) == 1 ? 0 : call_.M;
        // The kernel adds to the group that a key names, so every number is checked.
        for (int64_t t = 0; t < keys.size(0) * call_.M; t++)
            if (wanted.key_groups[t] < -1 || wanted.key_groups[t] >= wanted.group_count)
                keys.fail("be between -1 and " + std::to_string(wanted.group_count - 1) + ", got " +
                          std::to_string(wanted.key_groups[t]));
    }

    // Query i stands at i + query_offset, a sum that must not overflow.
    static void require_query_offset(int64_t query_offset) {
        constexpr int64_t most = int64_t{1} << 40;
        if (query_offset < -most || query_offset > most)
            throw std::invalid_argument("query_offset must be between -2^40 and 2^40, got " +
                                        std::to_string(query_offset));
    }

    void require_edges(const TorchTensor& tensor, const SecondPass& wanted) const {
        int64_t previous = 0;
        for (int64_t t = 0; t <= wanted.bin_count; t++) {
            const int64_t edge = wanted.bin_edges[t];
            if (edge < previous || edge > call_.M)
                tensor.fail("ascend from at least 0 to at most the " + std::to_string(call_.M) + " keys, got " +
                            std::to_string(edge) + " at index " + std::to_string(t));
            previous = edge;
        }
    }

    // `term_grads` is empty, or has one entry per term; the entry of a Toeplitz term is None.
    void read_term_gradients(const nb::sequence& term_grads, Gradients& gradients) const {
        const size_t count = nb::len(term_grads);
        if (count != 0 && count != call_.terms.size())
            throw std::invalid_argument("term_grads must have 0 or " + std::to_string(call_.terms.size()) +
                                        " elements, got " + std::to_string(count));
        for (size_t t = 0; t < count; t++) {
            const nb::object item = term_grads[t];
            const RelativeTerm& term = call_.terms[t];
            float* data = nullptr;
            if (!item.is_none()) {
                const int64_t rows = term.per_row ? call_.N : 1;
                data = contiguous_data<float>("term_grads", {item}, {call_.B, call_.H, rows, term.columns});
            }
            gradients.terms.push_back(data);
        }
    }

    AttentionCall call_;
    bool has_row_sums_ = false;
    std::vector<float> hard_max_;
    std::vector<nb::object> tensors_;
};

}  // namespace

void bind_attention(nb::module_& module) {
    nb::class_<AttentionBinding>(module, "AttentionCall",
                                 "One attention call: q [B, H, N, D], k [B or 1, G, M, D], v [B or 1, G, M, E] and "
                                 "out [B, H, N, E] of one dtype, with contiguous rows.")
        .def(nb::init<TensorArgument, TensorArgument, TensorArgument, TensorArgument, double, double, double, int64_t,
                      int>(),
             nb::kw_only(), "q"_a, "k"_a, "v"_a, "out"_a, "scale"_a, "softcap"_a, "dropout"_a, "seed"_a, "threads"_a)
        .def("set_row_sums", &AttentionBinding::set_row_sums, nb::kw_only(), "row_max"_a, "row_sum"_a,
             "float64 [B, H, N]: forward writes them, the other passes read them.")
        .def("set_lo", &AttentionBinding::set_lo, "lo"_a, "int64 [B or 1, N]: query i sees keys j >= lo[b, i].")
        .def("set_hi", &AttentionBinding::set_hi, "hi"_a, "int64 [B or 1, N]: query i sees keys j < hi[b, i].")
        .def("set_mask", &AttentionBinding::set_mask, "mask"_a,
             "bool, broadcastable to [B, H, N, M]; True: the query may see the key.")
        .def("set_bias", &AttentionBinding::set_bias, "bias"_a, "float32, broadcastable to [B, H, N, M].")
        .def("set_sinks", &AttentionBinding::set_sinks, "sinks"_a, "float32 [H].")
        .def("add_term", &AttentionBinding::add_term, nb::kw_only(), "table"_a, "query_positions"_a,
             "key_positions"_a, "first_offset"_a,
             "Adds a relative bias: table float32 [B or 1, H or 1, N or 1, columns], positions int64 [N] and [M].")
        .def("is_toeplitz", &AttentionBinding::is_toeplitz, "term"_a,
             "Whether a term depends on i - j alone, so that its gradient is part of toeplitz_grad.")
        .def("forward", &AttentionBinding::forward, "instruction_set"_a,
             "Fills out, and row_max and row_sum if they are set. Returns False if a result is not finite.")
        .def("forward_observed", &AttentionBinding::forward_observed, "instruction_set"_a, nb::kw_only(),
             "logit_max"_a, "entropy"_a, "peak"_a, "offset"_a, "distance"_a, "sink"_a, "local"_a,
             "peak_at"_a, "visible"_a, "map"_a, "groups"_a.none() = nb::none(), "key_groups"_a.none() = nb::none(),
             "real_queries"_a.none() = nb::none(), "query_offset"_a, "sink_keys"_a, "local_radius"_a,
             "Like forward. Also fills the row values [B, H, N], adds to map [H, size, size] (in units of 2**-32), and "
             "fills groups [B, H, N, count], the weights on the groups of keys that key_groups [B or 1, M] names.")
        .def("second_pass", &AttentionBinding::second_pass, "instruction_set"_a, nb::kw_only(), "counted"_a,
             "query_offset"_a, "key_mass"_a.none() = nb::none(), "profile"_a.none() = nb::none(),
             "profile_rows"_a.none() = nb::none(), "top"_a.none() = nb::none(), "top_at"_a.none() = nb::none(),
             "Adds to key mass and profile (in units of 2**-32) and fills the largest weights of each row.")
        .def("sum_bins", &AttentionBinding::sum_bins, "instruction_set"_a, nb::kw_only(), "edges"_a, "masses"_a,
             "Adds each row's weight on the keys edges[t] <= j < edges[t + 1] to masses [B, H, N, bins].")
        .def("backward", &AttentionBinding::backward, "instruction_set"_a, nb::kw_only(), "grad_out"_a, "dq"_a, "dk"_a,
             "dv"_a, "delta"_a, "toeplitz_grad"_a.none() = nb::none(), "bias_grad"_a.none() = nb::none(),
             "term_grads"_a, "grad_entropy"_a.none() = nb::none(), "entropy"_a.none() = nb::none(),
             "grad_logit_max"_a.none() = nb::none(), "peak_at"_a.none() = nb::none(),
             "contributed_keys"_a.none() = nb::none(), "contributed_map"_a.none() = nb::none(),
             "Adds to the gradients and contributions, which the caller must fill with 0 first, and overwrites delta. "
             "Returns False if a gradient is not finite.");
}

}  // namespace regard
