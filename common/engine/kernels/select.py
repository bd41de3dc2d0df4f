"""Which implementation of `Kernels` a device and a dtype get."""

import logging
from importlib import import_module

import torch

from common.engine.kernels.cpu.compiler import BuildError
from common.engine.kernels.cpu.kernels import CpuKernels
from common.engine.kernels.interface import Kernels
from common.engine.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


def create_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """The fastest kernels that work here for tensors of `dtype` on `device`.

    CUDA: Triton (imported only now; it is not needed elsewhere). CPU: native code for fp32; plain PyTorch for the
    other dtypes, and, with a warning, where there is no C++ compiler.
    """
    if device.type == "cuda":
        kernels: Kernels = import_module("common.engine.kernels.triton").TritonKernels()
        return kernels
    if device.type != "cpu" or dtype is not torch.float32:
        return ReferenceKernels()
    try:
        return CpuKernels()
    except BuildError as error:
        logger.warning("slow PyTorch kernels instead of native ones: %s", error)
        return ReferenceKernels()
