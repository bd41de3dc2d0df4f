"""Which implementation of `Kernels` a device and a dtype get."""

import torch

from common.engine.kernels.interface import Kernels
from common.engine.kernels.reference import ReferenceKernels


def create_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that work here for tensors of `dtype` on `device`."""
    return ReferenceKernels()
