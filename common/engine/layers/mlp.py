"""The gated MLP: down(silu(gate(x)) * up(x)), gate and up in one product."""

from torch import Tensor

from common.engine.kernels.interface import Kernels, PackedLinear


class GatedMLP:
    """One layer's MLP; holds weights, no state."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, kernels: Kernels) -> None:
        self._gate_up = gate_up
        self._down = down
        self._kernels = kernels

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self._down(self._kernels.silu_and_mul(self._gate_up(x)))
