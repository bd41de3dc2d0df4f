"""Compiles every Triton kernel for one GPU, without having one. Run by the test beside it, in a process of its own.

python compile_triton.py CAPABILITY DTYPE...      e.g. 90 bf16 fp32
"""

import sys
from collections.abc import Mapping

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.engine.kernels.triton import decode_attention, prefill_attention, rms_norm, rope_and_store, silu_and_mul

#: Pointers whose type is not that of the model, and scalars that are not integers.
FIXED_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("block_tables", "cu_seqlens_q", "seq_lens"), "*i32"),
    **dict.fromkeys(("positions", "slots"), "*i64"),
    **dict.fromkeys(("values", "lse", "cos", "sin"), "*fp32"),
    **dict.fromkeys(("scale", "eps"), "fp32"),
}
SCALARS = {"q_stride", "k_stride", "v_stride", "cache_stride", "table_width", "splits", "x_stride", "stride", "N"}


def kernels(head_dim: int, block_n: int) -> list[tuple[triton.JITFunction, Mapping[str, object]]]:
    """Each kernel with the constants of a Llama-like model."""
    attention = {"G": 8, "R": 4, "D": head_dim, "B": 16, "BLOCK_D": head_dim, "BLOCK_N": block_n, "WIDEN": False}
    return [
        (decode_attention.decode_split_kernel, {**attention, "SPLIT": 512, "BLOCK_R": 16}),
        (decode_attention.decode_merge_kernel, {"H": 32, "D": head_dim, "SPLIT": 512, "BLOCK_D": head_dim}),
        (prefill_attention.prefill_attention_kernel, {**attention, "BLOCK_M": 64}),
        (rms_norm.rms_norm_kernel, {"N": 4096, "BLOCK": 4096, "ADD": True}),
        (rms_norm.rms_norm_kernel, {"N": 576, "BLOCK": 1024, "ADD": False}),
        (silu_and_mul.silu_and_mul_kernel, {"BLOCK": 1024}),
        (
            rope_and_store.rope_and_store_kernel,
            {"H": 32, "G": 8, "D": 128, "B": 16, "BLOCK_H": 32, "BLOCK_G": 8, "BLOCK_HALF": 64},
        ),
    ]


def signature(kernel: triton.JITFunction, constants: Mapping[str, object], dtype: str) -> dict[str, str]:
    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return FIXED_TYPES.get(name, "i32" if name in SCALARS else f"*{dtype}")

    return {name: kind(name) for name in kernel.arg_names}


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    for dtype in sys.argv[2:]:
        shape = {"head_dim": 64, "block_n": 32} if dtype == "fp32" else {"head_dim": 128, "block_n": 64}
        for kernel, constants in kernels(**shape):
            source = ASTSource(fn=kernel, signature=signature(kernel, constants, dtype), constexprs=dict(constants))
            compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 2})
            print(kernel.__name__, len(compiled.asm["cubin"]), compiled.metadata.shared)


if __name__ == "__main__":
    main()
