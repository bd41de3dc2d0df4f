"""What a model computes, by device: start at `create_kernels`; `interface` is the contract."""

from common.engine.kernels.interface import Kernels, PackedLinear
from common.engine.kernels.select import create_kernels

__all__ = ["Kernels", "PackedLinear", "create_kernels"]
