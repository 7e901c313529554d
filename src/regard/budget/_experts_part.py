"""Feed-forward networks with experts as a part: all of them are held, and each token uses some."""

from __future__ import annotations

from dataclasses import dataclass

from regard.budget._parts import Call, Part, Product, Weight, smallest
from regard.budget._symbols import Number


@dataclass(frozen=True)
class Experts(Part):
    """Feed-forward networks of which a router chooses some for each token: ``Σ_e p_e(x)·FFN_e(x)``, gated ones.

    The parameters of all experts are held; a token uses `used` of them, the router and the shared expert.

    - `hidden`: hidden width of one expert; `experts`, `used`: how many there are, and how many a token uses.
    - `bias`: whether the maps of the experts have biases; `router_bias`: whether the router has one.
    - `shared`: hidden width of the expert that every token uses, without biases; 0 for none.
    - `shared_gate`: whether the shared expert's result is multiplied with a learned gate, one number per token.
    """

    operator_calls = 5

    d: Number
    hidden: Number
    experts: Number
    used: Number
    bias: bool = False
    router_bias: bool = False
    shared: Number = 0
    shared_gate: bool = False

    @property
    def _expert_size(self) -> Number:
        """Parameters of one expert."""
        biases: Number = 0
        if self.bias:
            biases = 2 * self.hidden + self.d
        return 3 * self.d * self.hidden + biases

    def weights(self) -> tuple[Weight, ...]:
        weights = [Weight("router.weight", (self.experts, self.d))]
        if self.router_bias:
            weights.append(Weight("router.bias", (self.experts,)))
        weights.append(Weight("experts.up", (self.experts, 2 * self.hidden, self.d)))
        weights.append(Weight("experts.down", (self.experts, self.d, self.hidden)))
        if self.bias:
            weights.append(Weight("experts.up.bias", (self.experts, 2 * self.hidden)))
            weights.append(Weight("experts.down.bias", (self.experts, self.d)))
        if self.shared != 0:
            weights.append(Weight("shared.up", (2 * self.shared, self.d)))
            weights.append(Weight("shared.down", (self.d, self.shared)))
        if self.shared_gate:
            weights.append(Weight("shared.gate", (1, self.d)))
        return tuple(weights)

    @property
    def active_parameters(self) -> Number:
        return self.parameters - (self.experts - self.used) * self._expert_size

    def products(self, call: Call) -> tuple[Product, ...]:
        rows = call.tokens * self.used
        # At most this many experts are read: each row may go to another one.
        read = smallest(self.experts, rows)
        products = [
            Product("router", "feed-forward", call.tokens, self.d, self.experts),
            Product("experts up", "feed-forward", rows, self.d, 2 * self.hidden, matrices=read),
            Product("experts down", "feed-forward", rows, self.hidden, self.d, matrices=read),
        ]
        if self.shared != 0:
            products.append(Product("shared up", "feed-forward", call.tokens, self.d, 2 * self.shared))
            products.append(Product("shared down", "feed-forward", call.tokens, self.shared, self.d))
        if self.shared_gate:
            products.append(Product("shared gate", "feed-forward", call.tokens, self.d, 1))
        return tuple(products)

    def _hidden_elements(self, call: Call) -> Number:
        """The number of hidden values of one map, of all experts that the tokens use."""
        return call.tokens * (self.used * self.hidden + self.shared)

    def saved_bytes(self, call: Call, size: Number) -> dict[str, Number]:
        hidden = size * self._hidden_elements(call)
        # The input, and its copy for each expert that reads it.
        inputs = size * call.tokens * self.d * (1 + self.used)
        return {"input": inputs, "before φ": hidden, "after φ": hidden, "up": hidden, "gated": hidden}

    def forward_peak(self, call: Call, size: Number) -> Number:
        copies = size * call.tokens * self.d * (1 + self.used)
        return copies + 4 * size * self._hidden_elements(call)

    def backward_peak(self, call: Call, size: Number) -> Number:
        return super().backward_peak(call, size) + 2 * size * self._hidden_elements(call)

    def elements_moved(self, call: Call) -> Number:
        # As in a gated feed-forward network, and the copies of the inputs and outputs of the experts.
        return 5 * self._hidden_elements(call) + call.tokens * self.d * (3 + 4 * self.used)

    def activation_elements(self, call: Call) -> Number:
        return self._hidden_elements(call)
