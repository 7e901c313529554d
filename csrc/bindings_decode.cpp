// Python bindings of the decoding kernels: linear layers of a few rows, norms, RoPE, and whole transformer blocks.
#include <stdexcept>

#include "tensor_arguments.h"

namespace regard {
namespace {

using namespace nb::literals;

// A bias [size] of a weight, or null if it is not given.
const void* read_bias(const char* name, TensorArgument bias, Dtype dtype, int64_t size) {
    if (!bias.given()) return nullptr;
    const TorchTensor tensor(name, bias);
    tensor.require_float_dtype(dtype);
    tensor.require_shape({size});
    tensor.require_contiguous();
    return tensor.data();
}

// A weight [outputs, inputs] with contiguous rows, and its bias [outputs].
LinearWeights read_linear(const char* name, TensorArgument weight, TensorArgument bias, Dtype dtype, int64_t outputs,
                          int64_t inputs) {
    const TorchTensor tensor(name, weight);
    tensor.require_float_dtype(dtype);
    tensor.require_shape({outputs, inputs});
    tensor.require_contiguous_rows();
    LinearWeights linear;
    linear.weight = tensor.data();
    linear.outputs = tensor.size(0);
    linear.weight_stride = tensor.stride(0);
    linear.bias = read_bias("bias", bias, dtype, linear.outputs);
    return linear;
}

NormWeights read_norm(const char* name, NormKind kind, TensorArgument weight, TensorArgument bias, double eps,
                      Dtype dtype, int64_t width) {
    const TorchTensor tensor(name, weight);
    tensor.require_float_dtype(dtype);
    tensor.require_shape({width});
    tensor.require_contiguous();
    NormWeights norm;
    norm.kind = kind;
    norm.weight = tensor.data();
    norm.bias = read_bias("bias", bias, dtype, width);
    norm.eps = eps;
    return norm;
}

void run_linear(const char* instruction_set, TensorArgument x, nb::sequence matrices, TensorArgument y, int threads) {
    const Kernels& kernels = kernels_named(instruction_set);
    const TorchTensor x_tensor("x", x);
    x_tensor.require_dimensions(2);
    x_tensor.require_contiguous_rows();
    LinearCall call;
    call.dtype = x_tensor.float_dtype();
    call.x = x_tensor.data();
    call.rows = x_tensor.size(0);
    call.inputs = x_tensor.size(1);
    call.x_stride = x_tensor.stride(0);
    call.threads = threads;

    std::vector<LinearWeights> weights;
    int64_t columns = 0;
    for (nb::handle item : matrices) {
        if (!nb::isinstance<nb::tuple>(item) || nb::len(item) != 2)
            throw nb::type_error("matrices must be a sequence of pairs (weight, bias or None)");
        const nb::tuple pair = nb::borrow<nb::tuple>(item);
        weights.push_back(read_linear("weight", {pair[0]}, {pair[1]}, call.dtype, kAnySize, call.inputs));
        if (__builtin_add_overflow(columns, weights.back().outputs, &columns))
            throw std::invalid_argument("matrices must have fewer than 2^63 outputs together");
    }
    call.matrices = weights.data();
    call.matrix_count = static_cast<int64_t>(weights.size());
    const TorchTensor y_tensor("y", y);
    y_tensor.require_float_dtype(call.dtype);
    y_tensor.require_shape({call.rows, columns});
    y_tensor.require_contiguous();
    call.y = y_tensor.data();
    nb::gil_scoped_release release;
    kernels.linear(call);
}

void run_norm(const char* instruction_set, NormKind kind, TensorArgument x, TensorArgument weight, TensorArgument bias,
              double eps, TensorArgument y, int threads) {
    const Kernels& kernels = kernels_named(instruction_set);
    const TorchTensor x_tensor("x", x);
    x_tensor.require_dimensions(2);
    x_tensor.require_contiguous_rows();
    NormCall call;
    call.dtype = x_tensor.float_dtype();
    call.x = x_tensor.data();
    call.rows = x_tensor.size(0);
    call.width = x_tensor.size(1);
    call.x_stride = x_tensor.stride(0);
    call.threads = threads;
    call.norm = read_norm("weight", kind, weight, bias, eps, call.dtype, call.width);
    const TorchTensor y_tensor("y", y);
    y_tensor.require_float_dtype(call.dtype);
    y_tensor.require_shape({call.rows, call.width});
    y_tensor.require_contiguous();
    call.y = y_tensor.data();
    nb::gil_scoped_release release;
    kernels.norm(call);
}

void run_rope(const char* instruction_set, RopeLayout layout, TensorArgument x, TensorArgument cos, TensorArgument sin,
              TensorArgument y) {
    const Kernels& kernels = kernels_named(instruction_set);
    const TorchTensor x_tensor("x", x);
    x_tensor.require_dimensions(4);
    x_tensor.require_contiguous_rows();
    RopeCall call;
    call.dtype = x_tensor.float_dtype();
    call.x = x_tensor.view();
    call.B = x_tensor.size(0);
    call.H = x_tensor.size(1);
    call.N = x_tensor.size(2);
    call.D = x_tensor.size(3);
    call.layout = layout;

    // cos and sin: [N, width] for all batch entries, or [B or 1, 1, N, width].
    const TorchTensor cos_tensor("cos", cos);
    call.width = cos_tensor.dimensions() > 0 ? cos_tensor.size(cos_tensor.dimensions() - 1) : 0;
    if (call.width % 2 != 0 || call.width > call.D)
        cos_tensor.fail("have an even width of at most " + std::to_string(call.D) + ", got " +
                        std::to_string(call.width));
    if (cos_tensor.dimensions() == 2) {
        call.cos = contiguous_data<float>("cos", cos, {call.N, call.width});
        call.sin = contiguous_data<float>("sin", sin, {call.N, call.width});
    } else {
        const int64_t batch = cos_tensor.size(0) == 1 ? 1 : call.B;
        call.cos = contiguous_data<float>("cos", cos, {batch, 1, call.N, call.width});
        call.sin = contiguous_data<float>("sin", sin, {batch, 1, call.N, call.width});
        call.angles_batch_stride = batch == 1 ? 0 : call.N * call.width;
    }
    const TorchTensor y_tensor("y", y);
    y_tensor.require_float_dtype(call.dtype);
    y_tensor.require_shape({call.B, call.H, call.N, call.D});
    y_tensor.require_contiguous();
    call.y = y_tensor.data();
    nb::gil_scoped_release release;
    kernels.rope(call);
}

// The parameters of one linear layer or norm of a block, as Python gives them.
struct LinearParameters {
    nb::object weight;
    nb::object bias;
};

struct NormParameters {
    NormKind kind;
    nb::object weight;
    nb::object bias;
    double eps;
};

// A DecodeBlock, and the parameters it points to, which this object keeps alive. `run` raises an error if the memory of
// a parameter has moved since the block was built.
class DecodeBlockBinding {
public:
    DecodeBlockBinding(int64_t heads, int64_t kv_heads, const NormParameters& attention_norm,
                       const NormParameters& feedforward_norm, const NormParameters* q_norm,
                       const NormParameters* k_norm, const LinearParameters& q_proj, const LinearParameters& k_proj,
                       const LinearParameters& v_proj, const LinearParameters& out_proj, const LinearParameters* gate,
                       const LinearParameters& up, const LinearParameters& down, Activation activation, double scale,
                       double softcap, TensorArgument sinks, int64_t rope_width, RopeLayout rope_layout) {
        if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0)
            throw std::invalid_argument("heads must be a multiple of kv_heads, got " + std::to_string(heads) + " and " +
                                        std::to_string(kv_heads));
        const TorchTensor first_norm("attention_norm", {attention_norm.weight});
        block_.dtype = first_norm.float_dtype();
        block_.width = first_norm.size(0);
        block_.H = heads;
        block_.G = kv_heads;
        block_.D = rows_per_head("q_proj", q_proj, heads);
        block_.E = rows_per_head("v_proj", v_proj, kv_heads);

        block_.attention_norm = norm("attention_norm", attention_norm, block_.width);
        block_.feedforward_norm = norm("feedforward_norm", feedforward_norm, block_.width);
        if (q_norm) block_.q_norm = norm("q_norm", *q_norm, block_.D);
        if (k_norm) block_.k_norm = norm("k_norm", *k_norm, block_.D);
        block_.q = linear("q_proj", q_proj, heads * block_.D, block_.width);
        block_.k = linear("k_proj", k_proj, checked_product("k_proj", kv_heads, block_.D), block_.width);
        block_.v = linear("v_proj", v_proj, kv_heads * block_.E, block_.width);
        block_.out = linear("out_proj", out_proj, block_.width, checked_product("out_proj", heads, block_.E));
        block_.up = linear("up", up, kAnySize, block_.width);
        if (gate) block_.gate = linear("gate", *gate, block_.up.outputs, block_.width);
        block_.down = linear("down", down, block_.width, block_.up.outputs);
        block_.activation = activation;
        block_.scale = scale;
        block_.softcap = softcap;
        if (sinks.given()) {
            block_.sinks = contiguous_data<float>("sinks", sinks, {heads});
            keep("sinks", nb::borrow(sinks.object));
        }
        if (rope_width < 0 || rope_width % 2 != 0 || rope_width > block_.D)
            throw std::invalid_argument("rope_width must be even and between 0 and " + std::to_string(block_.D) +
                                        ", got " + std::to_string(rope_width));
        block_.rope_width = rope_width;
        block_.rope_layout = rope_layout;
    }

    bool run(const char* instruction_set, TensorArgument x, TensorArgument y, TensorArgument cos, TensorArgument sin,
             TensorArgument k_cache, TensorArgument v_cache, int64_t length, int64_t visible, int threads) const {
        const Kernels& kernels = kernels_named(instruction_set);
        require_unmoved();
        DecodeCall call;
        call.x = token("x", x, call.rows);
        int64_t y_rows = 0;
        call.y = token("y", y, y_rows);
        if (y_rows != call.rows)
            throw std::invalid_argument("y must have the " + std::to_string(call.rows) + " rows of x, got " +
                                        std::to_string(y_rows));
        if (block_.rope_width) {
            call.cos = angles("cos", cos);
            call.sin = angles("sin", sin);
        }
        if (visible < 1 || visible > length)
            throw std::invalid_argument("visible must be between 1 and length, got " + std::to_string(visible) +
                                        " and " + std::to_string(length));
        call.k_cache = cache("k_cache", k_cache, call.rows, block_.D, length);
        call.v_cache = cache("v_cache", v_cache, call.rows, block_.E, length);
        call.length = length;
        call.visible = visible;
        call.threads = threads;
        nb::gil_scoped_release release;
        return kernels.decode_block(block_, call);
    }

private:
    struct Parameter {
        const char* name;
        nb::object tensor;
        void* data;
    };

    void keep(const char* name, const nb::object& tensor) {
        parameters_.push_back({name, tensor, TorchTensor(name, {tensor}).data()});
    }

    void require_unmoved() const {
        for (const Parameter& parameter : parameters_)
            if (data_pointer(parameter.tensor) != parameter.data)
                throw std::invalid_argument(std::string(parameter.name) +
                                            " must stay where it was when the block was built, but its memory has moved; build the block again");
    }

    int64_t rows_per_head(const char* name, const LinearParameters& parameters, int64_t heads) const {
        const TorchTensor weight(name, {parameters.weight});
        weight.require_dimensions(2);
        if (weight.size(0) == 0 || weight.size(0) % heads != 0)
            weight.fail("have a number of rows that is a multiple of " + std::to_string(heads) + " heads, got " +
                        std::to_string(weight.size(0)));
        return weight.size(0) / heads;
    }

    LinearWeights linear(const char* name, const LinearParameters& parameters, int64_t outputs, int64_t inputs) {
        keep(name, parameters.weight);
        if (!parameters.bias.is_none()) keep(name, parameters.bias);
        return read_linear(name, {parameters.weight}, {parameters.bias}, block_.dtype, outputs, inputs);
    }

    NormWeights norm(const char* name, const NormParameters& parameters, int64_t width) {
        keep(name, parameters.weight);
        if (!parameters.bias.is_none()) keep(name, parameters.bias);
        return read_norm(name, parameters.kind, {parameters.weight}, {parameters.bias}, parameters.eps, block_.dtype,
                         width);
    }

    // x or y: [rows, 1, width].
    void* token(const char* name, TensorArgument argument, int64_t& rows) const {
        const TorchTensor tensor(name, argument);
        tensor.require_float_dtype(block_.dtype);
        tensor.require_shape({kAnySize, 1, block_.width});
        tensor.require_contiguous();
        rows = tensor.size(0);
        return tensor.data();
    }

    // cos or sin of one position: [1, rope_width].
    const float* angles(const char* name, TensorArgument argument) const {
        return contiguous_data<float>(name, argument, {1, block_.rope_width});
    }

    // A cache [rows, G, capacity, width], capacity ≥ `length`.
    TensorView cache(const char* name, TensorArgument argument, int64_t rows, int64_t width, int64_t length) const {
        const TorchTensor tensor(name, argument);
        tensor.require_float_dtype(block_.dtype);
        tensor.require_shape({rows, block_.G, kAnySize, width});
        tensor.require_contiguous_rows();
        tensor.require_own_elements();
        if (length > tensor.size(2))
            tensor.fail("have at least " + std::to_string(length) + " entries in dimension 2, its capacity, got " + std::to_string(tensor.size(2)));
        return tensor.view();
    }

    DecodeBlock block_;
    std::vector<Parameter> parameters_;
};

}  // namespace

void bind_decode(nb::module_& module) {
    nb::enum_<NormKind>(module, "NormKind").value("rms", NormKind::rms).value("layer", NormKind::layer);
    nb::enum_<RopeLayout>(module, "RopeLayout").value("halves", RopeLayout::halves).value("pairs", RopeLayout::pairs);
    nb::enum_<Activation>(module, "Activation")
        .value("relu", Activation::relu)
        .value("gelu", Activation::gelu)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("silu", Activation::silu);

    // noconvert: an integer is not accepted in place of an enum.
    module.def("linear", &run_linear, "instruction_set"_a, nb::kw_only(), "x"_a, "matrices"_a, "y"_a, "threads"_a,
               "y [rows, Σ outputs] = x [rows, inputs] · [W1ᵀ W2ᵀ …] + biases for a few rows; matrices are pairs "
               "(weight [outputs, inputs], bias [outputs] or None).");
    module.def("norm", &run_norm, "instruction_set"_a, nb::kw_only(), "kind"_a.noconvert(), "x"_a, "weight"_a,
               "bias"_a.none() = nb::none(), "eps"_a, "y"_a, "threads"_a, "LayerNorm or RMSNorm of every row of x.");
    module.def("rope", &run_rope, "instruction_set"_a, nb::kw_only(), "layout"_a.noconvert(), "x"_a, "cos"_a, "sin"_a,
               "y"_a,
               "Rotates the first `width` features of each row of x [B, H, N, D]; cos and sin are [N, width] or "
               "[B or 1, 1, N, width].");

    nb::class_<LinearParameters>(module, "LinearParameters")
        .def(
            "__init__",
            [](LinearParameters* self, nb::object weight, nb::object bias) {
                new (self) LinearParameters{std::move(weight), std::move(bias)};
            },
            nb::kw_only(), "weight"_a, "bias"_a.none() = nb::none());
    nb::class_<NormParameters>(module, "NormParameters")
        .def(
            "__init__",
            [](NormParameters* self, NormKind kind, nb::object weight, nb::object bias, double eps) {
                new (self) NormParameters{kind, std::move(weight), std::move(bias), eps};
            },
            nb::kw_only(), "kind"_a.noconvert(), "weight"_a, "bias"_a.none() = nb::none(), "eps"_a);
    nb::class_<DecodeBlockBinding>(module, "DecodeBlock", "A transformer block with norms before its two parts.")
        .def(nb::init<int64_t, int64_t, const NormParameters&, const NormParameters&, const NormParameters*,
                      const NormParameters*, const LinearParameters&, const LinearParameters&, const LinearParameters&,
                      const LinearParameters&, const LinearParameters*, const LinearParameters&,
                      const LinearParameters&, Activation, double, double, TensorArgument, int64_t, RopeLayout>(),
             nb::kw_only(), "heads"_a, "kv_heads"_a, "attention_norm"_a, "feedforward_norm"_a,
             "q_norm"_a.none() = nb::none(), "k_norm"_a.none() = nb::none(), "q_proj"_a, "k_proj"_a, "v_proj"_a,
             "out_proj"_a, "gate"_a.none() = nb::none(), "up"_a, "down"_a, "activation"_a.noconvert(), "scale"_a,
             "softcap"_a, "sinks"_a.none() = nb::none(), "rope_width"_a, "rope_layout"_a.noconvert())
        .def("run", &DecodeBlockBinding::run, "instruction_set"_a, nb::kw_only(), "x"_a, "y"_a,
             "cos"_a.none() = nb::none(), "sin"_a.none() = nb::none(), "k_cache"_a, "v_cache"_a, "length"_a,
             "visible"_a, "threads"_a,
             "Passes one new token of each row through the block and appends its key and value to the cache. Returns "
             "False if the attention is not finite.");
}

}  // namespace regard
