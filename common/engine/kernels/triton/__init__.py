"""Triton kernels for GPUs: one kernel, or two-phase pair, a file. Importing this imports triton."""

from common.engine.kernels.triton.kernels import TritonKernels

__all__ = ["TritonKernels"]
