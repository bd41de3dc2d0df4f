"""ST: what a stream looks like, what is in it, and what becomes of it when its client does not read."""

import itertools
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import grpc
import httpx
import pytest
from openai import OpenAI

from common.pb.tandem.v1 import inference_pb2, inference_pb2_grpc
from tests.cases.case_data import MODEL, Case, Json, post
from tests.cases.characters import FORCED, assert_characters_are_whole
from tests.cases.processes import resident_bytes
from tests.cases.replies import REPLACEMENT, Reply, logprob_entries
from tests.cases.streams import RawStream
from tests.cases.system import CONTROL, System
from tests.cases.vocabulary import word_biases
from tests.e2e.cluster import PATIENCE, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

MIB = 2**20
#: What Linux lets a socket grow to.
LARGEST_SEND_BUFFER = 4 * MIB


# --- characters ---------------------------------------------------------------------------------------


def test_st_01_characters_of_several_tokens(system: System, cases: Mapping[str, Case]) -> None:
    assert_characters_are_whole(system, cases["ST-01"])


@pytest.mark.parametrize("stream", [True, False])
def test_st_01_forced_in_plain_utf8(system: System, stream: bool) -> None:
    """A choice has no JSON escapes in which a character could hide."""
    reply = system.complete("x", max_tokens=64, guided_choice=[FORCED], stream=stream)
    assert reply.text == FORCED
    if stream:
        assert all(REPLACEMENT not in piece for piece in reply.pieces())


def test_st_01_many_tokens_at_once(system: System) -> None:
    """A gateway that sleeps finds them when it wakes."""
    repeated = {"guided_regex": f"({FORCED} ){{8}}", "max_tokens": 400, "stream": True, "temperature": 0}
    with RawStream(system, post("/v1/completions", {"prompt": "x", **repeated})) as stream:
        stream.read_events(1)
        with system.cluster.members["gateway"].frozen():
            eventually(lambda: system.cluster.status("decode-0").running == 0, what="the end of the decoding")
        reply = stream.read_to_end()
    assert reply.text == f"{FORCED} " * 8
    assert all(REPLACEMENT not in piece for piece in reply.pieces())


# --- stop strings -------------------------------------------------------------------------------------


def test_st_02_stop_strings_across_tokens(system: System, tiny_model: Path) -> None:
    # 1. Text and boundaries of its tokens; with a penalty, so that words do not come again and again.
    settings = {"max_tokens": 48, "logprobs": 1, "frequency_penalty": 2, "logit_bias": word_biases(tiny_model)}
    prompt = "The capital of France is"
    whole = system.complete(prompt, **settings)
    text = whole.text
    starts = [offset - whole.logprobs[0][3] for _, _, _, offset in whole.logprobs]
    stops = stops_across_tokens(text, starts)
    assert len(stops) == 10
    # 2., 3. All places, plain and streamed, alone and behind one that never comes.
    for at, stop in stops:
        for stop_field in ([stop], ["zzzz", stop]):
            for stream in (False, True):
                options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
                reply = system.complete(prompt, **settings, stop=stop_field, **options)
                # The deltas joined are all that came: none has a character of the stop string.
                assert reply.text == text[:at], (stop, reply)
                assert reply.finish_reason == "stop"
                until = sum(start < at + len(stop) for start in starts)
                assert reply.usage["completion_tokens"] == until, (stop, reply)


def stops_across_tokens(text: str, starts: list[int]) -> list[tuple[int, str]]:
    """Ten strings of 4 to 10 characters, and their places: each begins inside one token and ends inside a later one."""
    found = []
    for at, length in itertools.product(range(1, len(text) - 10), range(4, 11)):
        begins_inside, ends_inside = at not in starts, at + length not in starts
        crosses = any(at < start < at + length for start in starts)
        if begins_inside and ends_inside and crosses and text.find(text[at : at + length]) == at:
            found.append((at, text[at : at + length]))
    return found[:: len(found) // 10][:10]


# --- form ---------------------------------------------------------------------------------------------


def test_st_03_usage_chunk(system: System, cases: Mapping[str, Case]) -> None:
    variants = {name: variant.changed(seed=7) for name, variant in cases["ST-03"].variants.items()}
    for name, variant in variants.items():
        chunks = system.send(variant).chunks
        assert all("choices" in chunk for chunk in chunks), name
        if not variant.body.get("stream_options", {}).get("include_usage"):
            assert all(chunk["choices"] for chunk in chunks), name
            assert all(chunk.get("usage") is None for chunk in chunks), name
            continue
        plain = system.send(variant.changed(stream=False, stream_options=None))
        *others, last = chunks
        assert last["choices"] == [] and all(chunk["choices"] for chunk in others), name
        assert all(chunk.get("usage") is None for chunk in others), name
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert last["usage"][count] == plain.usage[count], name


def test_st_04_every_chunk_is_whole(system: System, cases: Mapping[str, Case]) -> None:
    replies = system.run(cases["ST-04"])
    for name, object_ in (("chat", "chat.completion.chunk"), ("completions", "text_completion")):
        reply = replies[name]
        assert reply.headers["content-type"].partition(";")[0] == "text/event-stream"
        # `chunks` has asserted that each event is one line of data, and [DONE] the last.
        assert {chunk["object"] for chunk in reply.chunks} == {object_}
        assert {chunk["model"] for chunk in reply.chunks} == {MODEL}
        assert len({chunk["id"] for chunk in reply.chunks}) == 1
        (created,) = {chunk["created"] for chunk in reply.chunks}
        assert type(created) is int
        assert all("finish_reason" in choice for choice in reply.of_choice(0))
        assert reply.finish_reason in ("stop", "length")
    first, *later = [choice["delta"] for choice in replies["chat"].of_choice(0)]
    assert first["role"] == "assistant"
    assert all(delta.get("role") is None for delta in later)
    replies.assert_all_judged()


def test_st_04_official_client(system: System, cases: Mapping[str, Case]) -> None:
    variants = cases["ST-04"].variants
    with OpenAI(base_url=f"{system.cluster.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        chat = list(client.chat.completions.create(**variants["chat"].body))
        text = list(client.completions.create(**variants["completions"].body))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chat) == system.send(variants["chat"]).text
    assert "".join(chunk.choices[0].text for chunk in text) == system.send(variants["completions"]).text


# --- clients that leave or do not read ----------------------------------------------------------------


def endless(system: System) -> Json:
    return {"prompt": "Tell a story.", "max_tokens": system.context - 16, "ignore_eos": True, "stream": True}


@pytest.mark.parametrize("door", ["http", "grpc"])
def test_st_05_clients_that_leave(system: System, door: str) -> None:
    cluster = system.cluster
    left = "499" if door == "http" else "CANCELLED"
    before = cluster.status("decode-0")
    gone, failed = requests_with(system, left), requests_failed(system)
    leave_by_http(system) if door == "http" else leave_by_grpc(system)
    # Two seconds on an idle machine; that they did not go on to their end is counted below.
    cluster.wait_idle()
    eventually(lambda: requests_with(system, left) == gone + 8, what="eight requests that were left")
    assert requests_failed(system) == failed
    after = cluster.status("decode-0")
    assert after.cancelled_total == before.cancelled_total + 8
    assert after.failed_total == before.failed_total
    generated = system.metric("gateway", "tandem_gateway_output_tokens_total")
    assert system.send(CONTROL).usage["completion_tokens"] == 8
    assert system.metric("gateway", "tandem_gateway_output_tokens_total") == generated + 8


def requests_with(system: System, status: str) -> float:
    return system.metric("gateway", "tandem_gateway_requests_total", status=status)


def requests_failed(system: System) -> float:
    return sum(requests_with(system, status) for status in ("500", "502", "503", "504", "INTERNAL", "UNAVAILABLE"))


def leave_by_http(system: System) -> None:
    with ExitStack() as stack:
        streams = [stack.enter_context(RawStream(system, post("/v1/completions", endless(system)))) for _ in range(8)]
        for stream in streams:
            stream.read_events(1)
        for number, stream in enumerate(streams):
            stream.hang_up(reset=number % 2 == 1)


def leave_by_grpc(system: System) -> None:
    options = inference_pb2.GenerationOptions(max_tokens=system.context - 16, ignore_eos=True)
    request = inference_pb2.GenerateRequest(text="Tell a story.", options=options)
    with grpc.insecure_channel(system.cluster.grpc_target) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        calls = [stub.Generate(request, timeout=4 * PATIENCE) for _ in range(8)]
        for call in calls:
            next(call)
        for call in calls:
            call.cancel()


#: Half of them read late, half of them never.
NUM_READERS = 4


def test_st_06_clients_that_do_not_read(system: System) -> None:
    """Fewer clients than the case has, each with more choices: its answer is longer than the kernel's buffers."""
    messages = [{"role": "user", "content": "Tell a story."}]
    logprobs = {"logprobs": True, "top_logprobs": 20}
    body = {"messages": messages, **logprobs, "n": 4, "max_tokens": 900, "ignore_eos": True, "stream": True}
    before, accepted = system.resident_bytes()["gateway"], system.cluster.status("decode-0").accepted_total
    with ExitStack() as stack:
        variant = post("/v1/chat/completions", body)
        streams = [stack.enter_context(RawStream(system, variant, receive_buffer=4096)) for _ in range(NUM_READERS)]
        eventually(
            lambda: system.cluster.status("decode-0").accepted_total >= accepted + NUM_READERS, what="all streams"
        )
        for _ in range(20):
            assert system.send(CONTROL).text == system.control_text
        # Those who read nothing hold up neither the workers nor each other.
        eventually(lambda: system.cluster.status("decode-0").running == 0, what="the end of the decoding")
        assert resident_bytes(system.pids["gateway"]) - before < 50 * MIB
        for stream in streams[NUM_READERS // 2 :]:
            stream.hang_up()
        for stream in streams[: NUM_READERS // 2]:
            reply = stream.read_to_end()
            assert len(reply.raw) > LARGEST_SEND_BUFFER
            assert reply.finish_reasons == dict.fromkeys(range(4), "length")
            for index in range(4):
                entries = [entry for choice in reply.of_choice(index) for entry in logprob_entries(choice)]
                assert len(entries) == 900


def test_error_events_are_errors() -> None:
    """The helpers above would see one."""
    raw = b'data: {"error": {"message": "m", "type": "t", "param": null, "code": null}}\n\n'
    reply = Reply(CONTROL, 200, httpx.Headers({"content-type": "text/event-stream"}), raw, 0.0)
    with pytest.raises((AssertionError, ValueError)):
        _ = reply.chunks
