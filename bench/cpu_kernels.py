"""How near the native CPU kernels come to what this machine can do, beside plain torch.

    python bench/cpu_kernels.py [--rows 1,4,16,64] [--rounds 5] [--threads 2]

Times all linear layers of one step of SmolLM2-135M in fp32 for several numbers of rows, then attention for 16 decodes
at 300 tokens of context and for a prompt of 1,500. The limits are measured in the same run: reading 512 MB of huge
pages, and a product small enough for the cache. Every figure is the best of a few rounds; other load on the machine
still shows, so compare figures of one run only.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from common.engine.batch import Batch, SequenceChunk, build_batch
from common.engine.kernels.cpu.kernels import CpuKernels
from common.engine.kernels.cpu.memory import map_region
from common.engine.kernels.interface import Kernels, PackedLinear
from common.engine.kernels.reference import ReferenceKernels

LAYERS = 30
LAYER_SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEAD_SHAPE = (49152, 576)
QUERY_HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
CPU = torch.device("cpu")


def best_seconds(run: Callable[[], object], rounds: int) -> float:
    """The shortest of `rounds` runs, after one to warm up."""
    run()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_read_bandwidth(rounds: int) -> float:
    """Bytes a second while every byte of 512 MB in huge pages is read once."""
    data = map_region(512 * 1024 * 1024)[: 128 * 1024 * 1024].fill_(1.0).view(1024, -1)
    ones = torch.ones(data.shape[1])
    return data.nbytes / best_seconds(lambda: torch.mv(data, ones), rounds)


def measure_peak_flops(kernels: Kernels, rounds: int) -> float:
    """Operations a second of a product whose operands stay in the cache."""
    linear, x = kernels.pack_linear(torch.randn(1024, 192), None), torch.randn(96, 192)
    return 100 * 2 * 96 * 1024 * 192 / best_seconds(lambda: [linear(x) for _ in range(100)], 2 * rounds)


class Step:
    """All linear layers of a step, as weights for torch and packed for ours."""

    def __init__(self, kernels: Kernels) -> None:
        shapes = [*LAYER_SHAPES * LAYERS, HEAD_SHAPE]
        self.weights = [torch.randn(shape) for shape in shapes]
        self.packed: list[PackedLinear] = [kernels.pack_linear(weight, None) for weight in self.weights]
        self.num_parameters = sum(weight.numel() for weight in self.weights)

    def inputs(self, rows: int) -> list[Tensor]:
        by_width = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in self.weights}}
        return [by_width[weight.shape[1]] for weight in self.weights]


def bench_linear(step: Step, rows: int, rounds: int, bandwidth: float, flops: float) -> None:
    inputs = step.inputs(rows)
    ours = best_seconds(lambda: [f(x) for f, x in zip(step.packed, inputs, strict=True)], rounds)
    torchs = best_seconds(lambda: [F.linear(x, w) for w, x in zip(step.weights, inputs, strict=True)], rounds)
    limit = max(4 * step.num_parameters / bandwidth, 2 * rows * step.num_parameters / flops)
    print(
        f"{rows:5d} rows {torchs * 1e3:9.1f} ms torch {ours * 1e3:9.1f} ms ours "
        f"{4 * step.num_parameters / ours / 1e9:6.1f} GB/s {2 * rows * step.num_parameters / ours / 1e9:7.1f} GFLOP/s "
        f"{100 * limit / ours:4.0f} % of the limit"
    )


def bench_attention(name: str, lengths: Sequence[tuple[int, int]], kernels: Sequence[Kernels], rounds: int) -> None:
    """`lengths`: (start, tokens) of each chunk; all layers' worth, from pages of their own for each sequence."""
    blocks = [-(-(start + tokens) // BLOCK_SIZE) for start, tokens in lengths]
    free = iter(torch.randperm(sum(blocks)).tolist())
    chunks = [
        SequenceChunk([0] * tokens, start, [next(free) for _ in range(count)], True)
        for (start, tokens), count in zip(lengths, blocks, strict=True)
    ]
    batch = build_batch(chunks, BLOCK_SIZE, CPU)
    pages = [torch.randn(2, sum(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM) for _ in range(LAYERS)]
    query = torch.randn(batch.num_tokens, QUERY_HEADS, HEAD_DIM)
    pairs = sum(t + 1 for start, n in lengths for t in range(start, start + n))
    work = 4 * pairs * QUERY_HEADS * HEAD_DIM * LAYERS
    for kernel in kernels:
        seconds = best_seconds(partial(attend_all, kernel, query, pages, batch), rounds)
        print(f"{name} {seconds * 1e3:9.1f} ms {kernel.name:9s} {work / seconds / 1e9:7.1f} GFLOP/s")


def attend_all(kernels: Kernels, query: Tensor, pages: Sequence[Tensor], batch: Batch) -> None:
    for layer in pages:
        kernels.paged_attention(query, layer[0], layer[1], batch, HEAD_DIM**-0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,512")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    kernels = CpuKernels()
    bandwidth = measure_read_bandwidth(options.rounds)
    flops = measure_peak_flops(kernels, options.rounds)
    print(f"{options.threads} threads: reads {bandwidth / 1e9:.1f} GB/s, multiplies {flops / 1e9:.0f} GFLOP/s")
    step = Step(kernels)
    for rows in map(int, options.rows.split(",")):
        bench_linear(step, rows, options.rounds, bandwidth, flops)
    both = (kernels, ReferenceKernels())
    bench_attention("16 decodes at 300  ", [(299, 1)] * 16, both, options.rounds)
    bench_attention("prompt of 1,500    ", [(0, 1500)], both, options.rounds)
    bench_attention("512 more after 1000", [(1000, 512)], both, options.rounds)


if __name__ == "__main__":
    main()
