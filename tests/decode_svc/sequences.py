"""Jobs for tests of the decode scheduler, without an engine."""

from common.engine.block_pool import BlockPool
from common.engine.block_table import BlockTable
from common.sampling import SamplingParams
from decode_svc.request import ChoicePrefix, DecodeRequest, Job, Phase, PrefillTarget, Sequence, Transfer
from decode_svc.scheduler import DecodeScheduler


def make_job(pool: BlockPool, order: int, length: int, n: int = 1, *, first: int | None = None) -> Job:
    """A job whose prompt differs from all others' from its first token on (or from token `first` on)."""
    shared = 0 if first is None else first
    prompt = tuple(range(shared)) + tuple(1000 * (order + 1) + i for i in range(length - shared))
    request = DecodeRequest("s", f"r{order}", 0, prompt, (ChoicePrefix(),) * n, SamplingParams(max_tokens=100))
    return Job(request, arrived=0.0, order=order, tables=[BlockTable(pool, "") for _ in range(1 + n)])


def decoding(scheduler: DecodeScheduler, pool: BlockPool, order: int, length: int) -> Sequence:
    """A running choice: `length` tokens computed, one more known."""
    choice = make_job(pool, order, length).choices[0]
    choice.output_ids.append(7)
    assert choice.table.reserve(length), f"no room for {length} tokens"
    choice.table.commit(choice.tokens(0, length))
    scheduler.set_running(choice)
    assert choice.phase is Phase.DECODING
    return choice


def filling(scheduler: DecodeScheduler, pool: BlockPool, order: int, length: int) -> Sequence:
    """A prompt that is computed here, not a token of it yet."""
    prompt = make_job(pool, order, length).prompt
    assert prompt.table.reserve(length), f"no room for {length} tokens"
    scheduler.set_running(prompt)
    return prompt


def remote(scheduler: DecodeScheduler, pool: BlockPool, order: int, length: int) -> Sequence:
    """A prompt that a prefill worker fills."""
    job = make_job(pool, order, length)
    assert job.prompt.table.reserve(length), f"no room for {length} tokens"
    job.transfer = Transfer(order, PrefillTarget("p", "p:1"), 0, started=0.0, heard=0.0)
    scheduler.set_remote(job.prompt)
    return job.prompt
