"""The dispatcher over real gRPC and fake workers: the good path, refusals, cancels, deadlines."""

import asyncio

import pytest

from common.errors import ContextTooLong, DeadlineExceeded, InvalidRequest, NoWorker, Overloaded
from common.pb.tandem.v1 import decode_pb2, worker_pb2
from common.sampling import FinishReason
from tests.gateway.dispatching import collect, eventually, request, rig, tokens_of
from tests.gateway.fake_workers import FakeWorker, Run, token


async def silent(run: Run) -> None:
    """Accepts and says nothing more."""
    run.accept()


async def test_tokens_finish_reason_and_stats() -> None:
    worker = FakeWorker()
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(max_tokens=5, n=2, logprobs=1))
        deltas = await collect(generation)
        for choice in (0, 1):
            assert tokens_of(deltas, choice) == [token(choice, index) for index in range(5)]
            mine = [delta for delta in deltas if delta.choice == choice]
            assert [delta.finish_reason for delta in mine][-1] is FinishReason.LENGTH
            assert sum(len(delta.logprobs) for delta in mine) == 5
        stats = generation.stats
        assert stats is not None
        assert (stats.prompt_tokens, stats.output_tokens, stats.cached_tokens) == (10, 10, 3)
        assert stats.details["transfer_bytes"] == 4096
        assert set(stats.details) == {field.name for field in worker_stats_fields()}
        await generation.aclose()
        parts.assert_clean()
        await parts.grants_returned()
        assert parts.traffic.transfers.hidden_share == pytest.approx(0.8)
        submit = worker.runs[0].submit
        assert list(submit.prompt_ids) == list(range(10))
        assert submit.attempt == 0
        assert submit.sampling.seed == 7
        assert not submit.timeout_seconds


def worker_stats_fields() -> list[object]:
    return list(decode_pb2.Finished.DESCRIPTOR.fields_by_name["stats"].message_type.fields)


async def test_many_requests_share_one_stream() -> None:
    worker = FakeWorker()
    async with rig(worker) as parts:
        generations = await asyncio.gather(*(parts.dispatcher.submit(request(f"r{i}")) for i in range(50)))
        answers = await asyncio.gather(*(collect(generation) for generation in generations))
        assert all(tokens_of(deltas) == [token(0, index) for index in range(4)] for deltas in answers)
        assert worker.streams == 1
        parts.assert_clean()


async def test_slow_reader_gets_merged_deltas_and_holds_up_nobody() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        slow = await parts.dispatcher.submit(request("slow", max_tokens=100))
        run = await worker.submitted.get()
        for _ in range(100):
            run.tokens(1)
        run.finish()
        worker.behave = answer_at_once
        assert tokens_of(await collect(await parts.dispatcher.submit(request("quick"))))
        # By now all hundred deltas have been read from the same stream.
        deltas = await collect(slow)
        assert len(deltas) == 1
        assert tokens_of(deltas) == [token(0, index) for index in range(100)]


async def answer_at_once(run: Run) -> None:
    run.all_tokens()


async def test_rejected_names_the_field() -> None:
    async def reject(run: Run) -> None:
        run.reject("logit_bias", "token id 9999999 is not in the vocabulary")

    async with rig(FakeWorker(behave=reject)) as parts:
        with pytest.raises(InvalidRequest, match="not in the vocabulary") as caught:
            await parts.dispatcher.submit(request())
        assert caught.value.field == "logit_bias"
        parts.assert_clean()
        await parts.grants_returned()


async def test_shortage_goes_to_the_next_worker_and_then_is_overloaded() -> None:
    async def full(run: Run) -> None:
        run.shortage("all blocks taken", retry_after=3.5)

    first, second = FakeWorker(worker_id="decode-0", behave=full), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        assert tokens_of(await collect(await parts.dispatcher.submit(request("r1"))))
        assert len(second.runs) == 1
        second.behave = full
        with pytest.raises(Overloaded, match="all blocks taken") as caught:
            await parts.dispatcher.submit(request("r2"))
        assert caught.value.retry_after == 3.5
        parts.assert_clean()
        await parts.grants_returned()


async def test_too_long_and_unknown_worker() -> None:
    worker = FakeWorker(max_request_tokens=64)
    async with rig(worker) as parts:
        assert parts.dispatcher.limits().max_request_tokens == 64
        with pytest.raises(ContextTooLong, match="60 prompt and 5 output"):
            await parts.dispatcher.submit(request(prompt=range(60), max_tokens=5))
        await worker.crash()
        await eventually(lambda: not parts.cluster.routable("decode"))
        with pytest.raises(NoWorker):
            await parts.dispatcher.submit(request())
        assert parts.dispatcher.limits().max_request_tokens == 8192
        parts.assert_clean()


async def test_full_queue_is_overloaded_at_once() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker, capacity=1, max_waiting=1) as parts:
        first = await parts.dispatcher.submit(request("r1"))
        waiting = asyncio.create_task(parts.dispatcher.submit(request("r2")))
        await eventually(lambda: parts.queue.figures.waiting == 1)
        with pytest.raises(Overloaded, match="queue is full") as caught:
            await parts.dispatcher.submit(request("r3"))
        assert caught.value.retry_after is not None
        # The first token gives the capacity back.
        (await worker.submitted.get()).tokens(1)
        second = await waiting
        await first.aclose()
        await second.aclose()


async def test_close_cancels_on_the_worker_and_frees_the_grant() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request())
        run = await worker.submitted.get()
        await generation.aclose()
        await generation.aclose()
        await asyncio.wait_for(run.cancelled.wait(), 10)
        await eventually(lambda: parts.dispatcher.running == 0)
        assert await collect(generation) == []
        parts.assert_clean()
        await parts.grants_returned()


async def test_cancelling_the_caller_while_the_worker_has_not_answered() -> None:
    async def never(run: Run) -> None:
        return None

    worker = FakeWorker(behave=never)
    async with rig(worker) as parts:
        submitting = asyncio.create_task(parts.dispatcher.submit(request()))
        run = await worker.submitted.get()
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting
        await asyncio.wait_for(run.cancelled.wait(), 10)
        parts.assert_clean()
        await parts.grants_returned()


async def test_cancelled_choice_brings_no_delta_and_the_others_go_on() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request(n=2, max_tokens=6))
        run = await worker.submitted.get()
        run.tokens(2)
        stream = aiter(generation)
        seen = [await anext(stream), await anext(stream)]
        assert sorted(delta.choice for delta in seen) == [0, 1]
        generation.cancel_choice(0)
        generation.cancel_choice(0)
        # Tokens of the cancelled choice that were already on their way.
        run.step(run.delta(0, 2, [token(0, 2)]))
        await eventually(lambda: 0 in run.cancelled_choices)
        run.tokens(10)
        run.finish()
        rest = await collect(generation)
        assert {delta.choice for delta in rest} == {1}
        assert tokens_of([*seen, *rest], 1) == [token(1, index) for index in range(6)]
        assert generation.stats is not None


async def test_deadline_in_the_queue_before_the_answer_and_in_mid_stream() -> None:
    async def never(run: Run) -> None:
        return None

    worker = FakeWorker(behave=never)
    async with rig(worker, capacity=1) as parts:
        with pytest.raises(DeadlineExceeded):
            await parts.dispatcher.submit(request("r1", timeout=0.05))
        worker.behave = silent
        blocking = await parts.dispatcher.submit(request("r2"))
        with pytest.raises(DeadlineExceeded):
            await parts.dispatcher.submit(request("r3", timeout=0.05))
        await blocking.aclose()
        timed = await parts.dispatcher.submit(request("r4", timeout=0.2))
        with pytest.raises(DeadlineExceeded):
            await collect(timed)
        run = worker.runs[-1]
        assert 0 < run.submit.timeout_seconds <= 0.2
        await asyncio.wait_for(run.cancelled.wait(), 10)
        parts.assert_clean()
        await parts.grants_returned()


async def test_worker_reports_the_deadline() -> None:
    async def late(run: Run) -> None:
        run.accept()
        run.finish(decode_pb2.OUTCOME_DEADLINE, "time is up")

    async with rig(FakeWorker(behave=late)) as parts:
        with pytest.raises(DeadlineExceeded, match="time is up"):
            await collect(await parts.dispatcher.submit(request()))


async def test_a_grammar_that_takes_too_long_is_not_tried_again() -> None:
    async def refusing(run: Run) -> None:
        run.accept()
        run.finish(decode_pb2.OUTCOME_TOO_COMPLEX, "the grammar is too complex")

    worker = FakeWorker(behave=refusing)
    async with rig(worker) as parts:
        with pytest.raises(InvalidRequest, match="too complex") as caught:
            await collect(await parts.dispatcher.submit(request()))
        assert caught.value.field == "grammar" and len(worker.runs) == 1
        parts.assert_clean()


async def test_draining_worker_gets_no_new_work() -> None:
    first, second = FakeWorker(worker_id="decode-0"), FakeWorker(worker_id="decode-1")
    async with rig(first, second) as parts:
        first.update(state=worker_pb2.WORKER_STATE_DRAINING)
        await eventually(lambda: len(parts.cluster.routable("decode")) == 1)
        for index in range(5):
            await collect(await parts.dispatcher.submit(request(f"r{index}")))
        assert (len(first.runs), len(second.runs)) == (0, 5)


async def test_prefill_workers_are_offered_but_not_to_short_prompts_or_refused_pairs() -> None:
    decode, prefill = FakeWorker(), FakeWorker("prefill", "prefill-0")
    async with rig(decode, prefill, local_prefill_tokens=8) as parts:
        await collect(await parts.dispatcher.submit(request("long", prompt=range(100))))
        await collect(await parts.dispatcher.submit(request("short", prompt=range(8))))
        decode.update(refused=[f"{prefill.address}: weights_fingerprint: 'a' here, 'b' there"])
        await eventually(lambda: any(v.status and v.status.refused for v in parts.cluster.workers()))
        await collect(await parts.dispatcher.submit(request("refused", prompt=range(200, 300))))
        offered = {run.submit.request_id: run.submit.prefill_candidates for run in decode.runs}
        assert [(c.worker_id, c.address) for c in offered["long"]] == [("prefill-0", prefill.address)]
        assert not offered["short"]
        assert not offered["refused"]


async def test_drain_refuses_new_and_waits_for_the_running() -> None:
    worker = FakeWorker(behave=silent)
    async with rig(worker) as parts:
        generation = await parts.dispatcher.submit(request())
        parts.dispatcher.drain()
        with pytest.raises(Overloaded, match="shutting down"):
            await parts.dispatcher.submit(request("r2"))
        idle = asyncio.create_task(parts.dispatcher.idle())
        run = await worker.submitted.get()
        run.tokens(4)
        assert not idle.done()
        run.finish()
        assert len(tokens_of(await collect(generation))) == 4
        await asyncio.wait_for(idle, 10)


async def test_a_second_request_under_a_running_id_is_refused() -> None:
    async with rig(FakeWorker(behave=silent)) as parts:
        generation = await parts.dispatcher.submit(request("same"))
        with pytest.raises(InvalidRequest, match="same"):
            await parts.dispatcher.submit(request("same"))
        await generation.aclose()
