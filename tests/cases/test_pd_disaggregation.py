"""PD: the KV of a prompt comes from another process, which may be slow, gone, somebody else, or no fit at all."""

import json
import random
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from redis import Redis
from safetensors.torch import load_file, save_file

from common.sampling import SamplingParams
from deploy.valkey import valkey_url
from tests.cases.case_data import Case, Variant, post, token_array
from tests.cases.replies import Reply, logprob_entries
from tests.cases.streams import RawStream, json_events
from tests.cases.system import CONTROL, MONOLITH, System
from tests.e2e.asking import submit
from tests.e2e.cluster import Cluster, eventually, running_cluster
from tests.e2e.failure_fixtures import WORKER_OPTIONS, GrpcStream, registered
from tests.e2e.slow_model import MAX_LENGTH, slow_model
from tests.factories.served_model import WORKER_MEMORY, write_served_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BLOCK = 16


# --- PD-01: short prompts -----------------------------------------------------------------------------


def pattern(length: int) -> list[int]:
    return ([57, 102, 280, 30] * length)[:length]


def test_pd_01_short_prompts_by_the_gateway(tiny_system: System) -> None:
    def run(length: int) -> None:
        def ask(gateway: str, **fields: Any) -> str:
            salt = f"pd-01 {gateway} {length} {fields}"
            return tiny_system.complete(pattern(length), max_tokens=8, gateway=gateway, cache_salt=salt, **fields).text

        expected = ask(MONOLITH)
        # Twice: with nothing cached, and with everything cached on both sides.
        for _ in range(2):
            assert ask("gateway") == ask("gateway", stream=True) == expected, length

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, range(1, 2 * BLOCK + 2)))


def test_pd_01_wherever_the_prefix_is_cached(tiny_system: System) -> None:
    """On one side only: a second decode worker has seen nothing that went through the first one."""
    cluster = tiny_system.cluster
    cluster.add_worker("decode-1", local_prefill_tokens="0", block_size=str(BLOCK))
    try:
        eventually(lambda: "prefill-0" in cluster.status("decode-1").paired, what="the pair of decode-1")
        prefill = [cluster.members["prefill-0"].address]
        first, second = (cluster.members[name].address for name in ("decode-0", "decode-1"))
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1):
            prompt = pattern(length)
            alone = submit(first, prompt, params, salt=f"alone {length}")
            nowhere = submit(first, prompt, params, prefill=prefill, salt=f"a {length}")
            on_prefill = submit(second, prompt, params, prefill=prefill, salt=f"a {length}")
            on_both = submit(first, prompt, params, prefill=prefill, salt=f"a {length}")
            on_decode = submit(first, prompt, params, prefill=prefill, salt=f"alone {length}")
            assert not alone.was_transferred
            for answer in (nowhere, on_prefill, on_both, on_decode):
                assert answer.was_transferred
                assert answer.token_ids == alone.token_ids, length
            cached = (length - 1) // BLOCK * BLOCK
            assert (nowhere.cached_tokens, on_prefill.stats.decode_cached_tokens) == (0, 0)
            assert on_prefill.cached_tokens == on_both.stats.decode_cached_tokens == cached
            assert on_decode.stats.decode_cached_tokens == cached
    finally:
        cluster.members.pop("decode-1").kill()


# --- PD-02: log probabilities over two workers --------------------------------------------------------


def test_pd_02_logprobs_from_the_first_token_on(system: System, cases: Mapping[str, Case]) -> None:
    variants = cases["PD-02"].variants
    replies = system.run(cases["PD-02"])
    for name in ("stream False", "stream True"):
        entries = replies[name].logprobs
        for entry in entries:
            assert len(entry["top_logprobs"]) == 5
            assert entry["logprob"] in [
                top["logprob"] for top in entry["top_logprobs"] if top["token"] == entry["token"]
            ]
    assert len(replies["stream False"].logprobs) == replies["stream False"].usage["completion_tokens"]
    assert replies["stream True"].logprobs == replies["stream False"].logprobs
    echoed = replies["echo"]
    assert len(echoed.logprobs) == 5 + echoed.usage["completion_tokens"]
    assert echoed.logprobs[0][1] is None and all(entry[1] is not None for entry in echoed.logprobs[1:])
    two = [logprob_entries(choice) for choice in replies["n=2"].json["choices"]]
    assert len(two) == 2 and sum(map(len, two)) == replies["n=2"].usage["completion_tokens"]
    for name, variant in variants.items():
        monolithic = system.send(variant.changed(cache_salt="pd-02"), gateway=MONOLITH)
        apart, whole = flat(replies[name]), flat(monolithic)
        assert [token for token, _, _, _ in apart] == [token for token, _, _, _ in whole]
        assert [offset for *_, offset in apart] == [offset for *_, offset in whole]
        for (_, value, top, _), (_, expected, expected_top, _) in zip(apart, whole, strict=True):
            assert value == (expected if expected is None else pytest.approx(expected, abs=1e-3))
            assert top == (None if expected_top is None else pytest.approx(expected_top, abs=1e-3))
    replies.assert_all_judged()


def flat(reply: Reply) -> list[tuple[str, float | None, Any, int | None]]:
    """(token, value, alternatives, offset) of all choices; chats have no offsets."""
    choices = [c for chunk in reply.chunks for c in chunk["choices"]] if reply.is_stream else reply.json["choices"]
    entries = [entry for choice in choices for entry in logprob_entries(choice)]
    if entries and isinstance(entries[0], dict):
        return [
            (e["token"], e["logprob"], {t["token"]: t["logprob"] for t in e["top_logprobs"]}, None) for e in entries
        ]
    return entries


# --- PD-03: clients that leave in any phase -----------------------------------------------------------

#: Little staging, so that KV is still on its way when the prompt is computed.
SLOW_LINK = {"--staging-memory": "16KiB", "--slot-bytes": "8KiB"}
STORM = 60


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return slow_model(tmp_path_factory.mktemp("slow-model")).folder


@pytest.fixture
def slow_link(slow: Path, scratch: Path) -> Iterator[System]:
    with running_cluster(slow, scratch, worker_options={**WORKER_OPTIONS, **SLOW_LINK}) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


def test_pd_03_cancelled_in_any_phase(slow_link: System) -> None:
    """Fewer than in the case; each is left at a moment of its own, and then many at the same one."""
    system, draw = slow_link, random.Random(3)
    slots = system.cluster.status("decode-0").staging
    delays = [draw.uniform(0.0, 0.4) for _ in range(STORM)]

    def leave(number: int) -> None:
        prompt = token_array(1000, seed=5000 + number)
        if number % 3 == 0:
            with GrpcStream(system.cluster, prompt, 200, deadline=max(delays[number], 0.001)) as stream:
                assert stream.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        elif number % 3 == 1:
            with GrpcStream(system.cluster, prompt, 200):
                moment_of(delays[number])
        else:
            body = {"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": number % 2 == 0}
            with RawStream(system, post("/v1/completions", body)):
                moment_of(delays[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(leave, range(STORM)))
    with ExitStack() as stack:
        for number in range(25):
            body = {"prompt": token_array(1000, seed=6000 + number), "max_tokens": 200, "stream": True}
            stack.enter_context(RawStream(system, post("/v1/completions", body)))
        eventually(lambda: system.cluster.status("prefill-0").transfers > 0, what="a transfer")
    system.cluster.wait_idle()
    # Slots are granted to a pair for as long as it lasts.
    eventually(lambda: system.cluster.status("decode-0").staging == slots, what="all slots as they were")
    for _ in range(20):
        assert system.send(CONTROL).text == system.control_text
    system.assert_alive()


def moment_of(seconds: float) -> None:
    """When a client leaves is what this case draws."""
    threading.Event().wait(seconds)


# --- PD-04: prefill fails -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def breakable(slow: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    with running_cluster(
        slow, make_scratch(), worker_options=WORKER_OPTIONS, decode_options={"--prefill-timeout": "2"}
    ) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


@pytest.fixture
def failing(breakable: System, cases: Mapping[str, Case]) -> Iterator["Failing"]:
    """Whole again after the test, with decode and gateway untouched."""
    untouched = {name: pid for name, pid in breakable.pids.items() if not name.startswith("prefill")}
    yield Failing(breakable, cases["PD-04"].single)
    breakable.cluster.restore()
    breakable.note_processes()
    assert untouched.items() <= breakable.pids.items()
    eventually(lambda: used_prefill(breakable), what="the prefill worker being used again")
    breakable.assert_alive()


def used_prefill(system: System, *, length: int = 100) -> bool:
    """Whether a new prompt was computed on the prefill worker; it is answered in any case."""
    before = system.cluster.status("prefill-0").finished_total
    assert system.complete(token_array(length, seed=random.randrange(10**9)), max_tokens=2).status == 200
    return system.cluster.status("prefill-0").finished_total > before


class Failing:
    """The request of the case, its text cut to what the slow model takes (a token for each character)."""

    def __init__(self, system: System, request: Variant) -> None:
        self.system = system
        content = request.body["messages"][0]["content"][:1400]
        self.request = request.changed(messages=[{"role": "user", "content": content}], temperature=0)

    def fresh(self) -> Variant:
        """With nothing of it in a cache."""
        return self.request.changed(cache_salt=str(random.randrange(10**9)))

    @contextmanager
    def prefilling(self) -> Iterator[RawStream]:
        """The request, on the prefill worker in mid-prompt."""
        with RawStream(self.system, self.fresh()) as stream:
            eventually(lambda: self._in_mid_prompt(), what="a prompt that is half sent")
            yield stream

    def _in_mid_prompt(self) -> bool:
        status = self.system.cluster.status("prefill-0")
        return status.queued_tokens > 0 and status.transfers > 0

    def right(self) -> str:
        return self.system.send(self.fresh()).text

    def assert_served(self, reply: Reply, right: str) -> None:
        """Our choice of the case's: decode prefills in the place of a worker that failed."""
        assert reply.status == 200, reply
        assert reply.text == right
        self.system.cluster.wait_idle(workers=["decode-0"])


def test_pd_04_prefill_stopped(failing: Failing) -> None:
    right = failing.right()
    failing.system.cluster.members["prefill-0"].kill()
    failing.assert_served(failing.system.send(failing.fresh()), right)


def test_pd_04_prefill_killed_in_mid_prompt(failing: Failing) -> None:
    right = failing.right()
    with failing.prefilling() as stream:
        failing.system.cluster.members["prefill-0"].kill()
        failing.assert_served(stream.read_to_end(), right)


def test_pd_04_prefill_hangs_with_half_of_it_sent(failing: Failing) -> None:
    right = failing.right()
    with failing.prefilling() as stream, failing.system.cluster.members["prefill-0"].frozen():
        failing.assert_served(stream.read_to_end(), right)


def test_pd_04_prefill_without_memory(slow: Path, scratch: Path, cases: Mapping[str, Case]) -> None:
    """Its pool cannot hold the prompt: it refuses the hand-over, and says so."""
    with running_cluster(
        slow, scratch, worker_options=WORKER_OPTIONS, prefill_options={"--kv-memory": "0.5MiB"}
    ) as cluster:
        system = System.fresh(cluster, context=MAX_LENGTH)
        failing = Failing(system, cases["PD-04"].single)
        reply = system.send(failing.fresh())
        failing.assert_served(reply, failing.right())
        system.assert_alive()


# --- PD-05: restarts ----------------------------------------------------------------------------------


@pytest.fixture
def restarting(breakable: System) -> Iterator[System]:
    breakable.cluster.restore()
    yield breakable
    breakable.note_processes()
    breakable.assert_alive()


def serve(system: System, count: int = 5) -> None:
    """The first request after readiness succeeds, and the others."""
    for number in range(count):
        assert system.send(CONTROL).text == system.control_text, number
        reply = system.complete(token_array(200, seed=random.randrange(10**9)), max_tokens=4, ignore_eos=True)
        assert reply.usage["completion_tokens"] == 4


@pytest.mark.parametrize(
    "names",
    [["prefill-0"], ["decode-0"], ["prefill-0", "decode-0"], ["gateway"]],
    ids=["prefill", "decode", "both", "gateway"],
)
def test_pd_05_restarted_under_the_same_address(restarting: System, names: list[str]) -> None:
    cluster = restarting.cluster
    serve(restarting)
    untouched = {name: pid for name, pid in restarting.pids.items() if name not in names}
    old = {name: cluster.status(name).incarnation for name in names if name != "gateway"}
    for name in names:
        cluster.members[name].kill()
    cluster.restore()
    serve(restarting)
    restarting.note_processes()
    assert untouched.items() <= restarting.pids.items()
    for name, incarnation in old.items():
        assert cluster.status(name).incarnation != incarnation
    # The pair was made anew, and is used.
    eventually(lambda: used_prefill(restarting), what="the prefill worker being used again")
    eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="nobody else in the registry")


def test_pd_05_one_of_two_prefill_workers_under_load(restarting: System) -> None:
    cluster, system = restarting.cluster, restarting
    cluster.add_worker("prefill-1")
    cluster.wait_ready()
    load = [
        post("/v1/completions", {"prompt": token_array(700, seed=n), "max_tokens": 30, "temperature": 0})
        for n in range(8)
    ]
    calm = [reply.texts for reply in system.send_all(load, at_once=8)]
    fresh = [variant.changed(cache_salt="under load") for variant in load]
    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(system.send, variant) for variant in fresh]
        eventually(lambda: cluster.status("prefill-1").running > 0, what="a prompt on prefill-1")
        cluster.members["prefill-1"].kill()
        cluster.restore()
        assert [future.result().texts for future in running] == calm
    serve(system, 2)
    # Gone for good: its entry lapses.
    cluster.members.pop("prefill-1").kill()
    eventually(lambda: registered(cluster) == {"prefill-0", "decode-0"}, what="its entry to lapse")


# --- PD-06: workers that do not fit -------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(tiny_model: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    """A decode worker without any prefill worker that fits."""
    with running_cluster(
        tiny_model,
        make_scratch(),
        prefill=0,
        worker_options=WORKER_MEMORY,
        decode_options={"--local-prefill-tokens": "0"},
    ) as cluster:
        yield System.fresh(cluster, context=2048)


def other_model(folder: Path, tiny_model: Path, change: str) -> Path:
    """A copy of the tiny model that differs in one thing."""
    if change == "num_layers":
        write_served_model(folder, num_layers=5)
        return folder
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    if change == "one tensor":
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        name = sorted(name for name in tensors if name.endswith("mlp.down_proj.weight"))[-1]
        tensors[name] = tensors[name] + torch.tensor(0.01)
        save_file(tensors, file, metadata={"format": "pt"})
    elif change == "rope":
        edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=5000.0))
    elif change == "chat template":
        template = {"chat_template": "{{ messages[0]['content'] }}"}
        edit_json(folder / "tokenizer_config.json", lambda config: config.update(template))
    return folder


def edit_json(file: Path, edit: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")


#: What differs, the option or the model that does it, and the field that the refusal names.
MISFITS: dict[str, tuple[dict[str, str], str, str]] = {
    "kv dtype bf16": ({"dtype": "bfloat16"}, "", "kv_dtype"),
    "kv dtype fp16": ({"dtype": "float16"}, "", "kv_dtype"),
    "one tensor": ({}, "one tensor", "weights_fingerprint"),
    "rope": ({}, "rope", "weights_fingerprint"),
    "number of layers": ({}, "num_layers", "num_layers"),
    "chat template": ({}, "chat template", "tokenizer_fingerprint"),
    "context": ({"max_model_len": "1024"}, "", "max_model_len"),
}


@pytest.mark.parametrize("difference", MISFITS)
def test_pd_06_a_pair_that_does_not_fit_is_refused(
    alone: System, tiny_model: Path, tmp_path: Path, difference: str
) -> None:
    options, change, field = MISFITS[difference]
    if change:
        options = {**options, "model": str(other_model(tmp_path, tiny_model, change))}
    cluster = alone.cluster
    member = cluster.add_worker("prefill-0", **options)
    try:
        there, here = getattr(cluster.manifest("prefill-0"), field), getattr(cluster.manifest("decode-0"), field)
        assert there != here
        for name, peer in (("decode-0", member.address), ("prefill-0", "decode-0")):
            reason = eventually(lambda name=name, peer=peer: refusal(cluster, name, peer), what=f"a refusal by {name}")
            assert field in reason and str(there) in reason and str(here) in reason
        assert not cluster.status("decode-0").paired
        # Decode serves alone, which is a match with itself.
        for _ in range(3):
            assert alone.send(CONTROL).text == alone.control_text
        assert member.alive
    finally:
        cluster.members.pop("prefill-0").kill()
    alone.assert_alive()


def refusal(cluster: Cluster, worker: str, peer: str) -> str:
    return next((reason for reason in cluster.status(worker).refused if reason.startswith(peer)), "")


def test_pd_06_block_sizes_may_differ(alone: System) -> None:
    """The wire form knows no blocks: such a pair is used, and right."""
    cluster = alone.cluster
    cluster.add_worker("prefill-0", block_size="32")
    try:
        cluster.wait_ready()
        prompt, params = token_array(100, seed=6), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        decode, prefill = (cluster.members[name].address for name in ("decode-0", "prefill-0"))
        apart = submit(decode, prompt, params, prefill=[prefill], salt="apart")
        assert apart.was_transferred
        assert apart.token_ids == submit(decode, prompt, params, salt="here").token_ids
    finally:
        cluster.members.pop("prefill-0").kill()


# --- PD-07: Redis comes and goes ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def redis_system(slow: Path, make_scratch: Callable[[], Path]) -> Iterator[System]:
    with running_cluster(slow, make_scratch(), worker_options=WORKER_OPTIONS) as cluster:
        yield System.fresh(cluster, context=MAX_LENGTH)


def backend(system: System) -> str:
    return str(system.cluster.gateway_status()["queue"]["backend"])


@contextmanager
def killed(system: System) -> Iterator[None]:
    system.cluster.kill_valkey()
    yield
    system.cluster.start_valkey()


@contextmanager
def frozen(system: System) -> Iterator[None]:
    """Connections stay half open: nobody answers, and nobody says so."""
    with system.cluster.frozen_valkey():
        yield


@contextmanager
def flushed(system: System) -> Iterator[None]:
    with Redis.from_url(valkey_url(system.cluster.scratch)) as redis:
        redis.flushall()
    yield


@pytest.mark.parametrize("fault", [killed, frozen, flushed])
def test_pd_07_redis_comes_and_goes(redis_system: System, fault: Callable[[System], Any]) -> None:
    system = redis_system
    eventually(lambda: backend(system) == "redis", what="the queue in Redis")
    # Nothing is cached from the fault before: all prompts are under way when this one comes.
    drawn = {"temperature": 0, "cache_salt": fault.__name__}
    long = {**drawn, "max_tokens": 150, "ignore_eos": True, "stream": True}
    streaming = [post("/v1/completions", {"prompt": token_array(50, seed=n), **long}) for n in range(3)]
    waiting = [
        post("/v1/completions", {"prompt": token_array(3000, seed=100 + n), "max_tokens": 4, **drawn}) for n in range(5)
    ]
    begun = system.requests_begun()
    with ExitStack() as stack, ThreadPoolExecutor(5) as pool:
        streams = [stack.enter_context(RawStream(system, variant)) for variant in streaming]
        for stream in streams:
            stream.read_events(2)
        queued = [pool.submit(system.send, variant) for variant in waiting]
        eventually(lambda: system.requests_begun() == begun + 8, what="five more requests")
        with fault(system):
            # Not a hang while Redis is away: the gateway admits by itself.
            assert system.send(CONTROL).text == system.control_text
            answers = [future.result() for future in queued]
            ended = [stream.read_to_end() for stream in streams]
    assert all(reply.status == 200 for reply in answers)
    assert all(len(json_events(reply.raw)) > 100 and reply.finish_reason == "length" for reply in ended)
    eventually(lambda: backend(system) == "redis", what="the queue in Redis again")
    for _ in range(20):
        assert system.send(CONTROL).text == system.control_text
    eventually(lambda: registered(system.cluster) == {"prefill-0", "decode-0"}, what="both workers announced again")
    system.assert_alive()


def test_pd_07_worker_killed_with_a_request_it_just_took(redis_system: System) -> None:
    """No worker pops jobs: what it has accepted is the gateway's to hand to the next one."""
    system = redis_system
    cluster = system.cluster
    body = {"prompt": token_array(2000, seed=77), "max_tokens": 4, "temperature": 0}
    right = system.send(post("/v1/completions", body)).text
    accepted = cluster.status("decode-0").accepted_total
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(system.send, post("/v1/completions", {**body, "cache_salt": "again"}))
        eventually(lambda: cluster.status("decode-0").accepted_total > accepted, what="the request being accepted")
        cluster.members["decode-0"].kill()
        cluster.members["decode-0"].start()
        reply = asked.result()
    assert reply.status == 503 or reply.text == right, reply
    cluster.restore()
    system.note_processes()
    system.assert_alive()
