"""The compiler with its real process: any source ends in a grammar or in words, and the next one is served."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from common.engine.grammar.compiler import GrammarCompiler
from common.engine.grammar.job_compiler import _longer
from common.engine.grammar.limits import CompileLimits
from common.engine.grammar.vocabulary import Vocabulary
from common.errors import InvalidRequest, Overloaded
from common.sampling import GrammarKind, GrammarSpec
from tests.common.engine.grammar.compilers import (
    NEVER_STOPPED,
    PATIENCE,
    begun,
    compiling,
    endless,
    literal,
    refusal,
    until,
    works,
)
from tests.common.engine.grammar.hostile import HOSTILE, WRONG
from tests.common.engine.grammar.processes import children_of, descriptors, is_alive
from tests.common.engine.grammar.tiny import SPECS, Bench, make_vocabulary, masks_along, no_bugs, random_output
from tests.common.text.model_folders import byte_level_folder
from tests.factories.rpc import eventually

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    with compiling(vocabulary, CompileLimits(cpu_seconds=0.5)) as made:
        yield made


@pytest.fixture(scope="module")
def patient(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    """One that lets jobs run on. Each test leaves it with nothing to do."""
    with compiling(vocabulary, NEVER_STOPPED, max_waiting=3) as made:
        yield made


async def job_of(compiler: GrammarCompiler) -> int:
    """Pid of the only job that has begun."""
    [job] = await begun(compiler, 1)
    return job


class TestWhatComesBack:
    @pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
    def test_the_grammar_that_this_process_would_have_made(
        self, bench: Bench, compiler: GrammarCompiler, spec: GrammarSpec
    ) -> None:
        there, here = compiler.compile(spec).result(PATIENCE), bench.compile(spec)
        output = random_output(here, seed=3)
        pairs = zip(masks_along(there, output), masks_along(here, output), strict=True)
        assert all(np.array_equal(a, b) for a, b in pairs)
        assert make_vocabulary(bench.tokenizer).load_grammar(spec.kind, there.serialized).serialized == there.serialized

    @pytest.mark.parametrize(("spec", "words"), WRONG.values(), ids=WRONG)
    def test_what_is_wrong_in_words(self, compiler: GrammarCompiler, spec: GrammarSpec, words: str) -> None:
        message = refusal(compiler.compile(spec))
        assert words in message and len(message) < 400
        assert ".cc" not in message and "Check failed" not in message
        assert works(compiler, "after")

    @pytest.mark.parametrize("spec", HOSTILE.values(), ids=HOSTILE)
    def test_whatever_it_is_it_ends_and_others_are_served(self, compiler: GrammarCompiler, spec: GrammarSpec) -> None:
        process = compiler.pid
        hostile, next_one = compiler.compile(spec), compiler.compile(literal(f"x{len(spec.source)}"))
        error = hostile.exception(PATIENCE)
        assert error is None or isinstance(error, InvalidRequest), error
        assert next_one.result(PATIENCE).num_words > 0
        assert process == compiler.pid, "a job took the process with it"

    @pytest.mark.parametrize("bounds", [{"maxLength": 10_000}, {"minLength": 500}, {"minLength": 1}])
    def test_long_bounds_of_strings_are_followed_fast(self, compiler: GrammarCompiler, bounds: dict[str, int]) -> None:
        schema = {"type": "object", "properties": {name: {"type": "string", **bounds} for name in "abc"}}
        spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))
        assert compiler.compile(spec).result(PATIENCE).num_words > 0

    def test_answers_are_kept_refusals_too(self, compiler: GrammarCompiler) -> None:
        assert compiler.compile(literal("kept")).result(PATIENCE) is compiler.compile(literal("kept")).result(0)
        bad = HOSTILE["many rules"]
        words = refusal(compiler.compile(bad))
        again = compiler.compile(bad)
        assert again.done() and refusal(again) == words
        assert words == "too complex: it takes more than 0.5 s to compile"

    def test_kinds_are_told_apart(self, compiler: GrammarCompiler) -> None:
        source = '{"type": "null"}'
        as_schema = compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, source)).result(PATIENCE)
        assert refusal(compiler.compile(GrammarSpec(GrammarKind.EBNF, source)))
        assert as_schema is compiler.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, source)).result(0)


@pytest.fixture(scope="module")
def meagre(vocabulary: Vocabulary) -> Iterator[GrammarCompiler]:
    """One with too little of everything but time."""
    made = GrammarCompiler(
        vocabulary,
        on_fatal=no_bugs,
        limits=CompileLimits(memory_bytes=24 << 20, output_bytes=100_000, mask_seconds=1e-7),
    )
    made.start()
    yield made
    made.close()


class TestLimits:
    @pytest.mark.parametrize(
        ("spec", "words"),
        [
            (HOSTILE["repeated repetition"], "it takes more than 24 MiB of memory to compile"),
            (HOSTILE["shared 14"], "its compiled form exceeds 97 KiB"),
            (GrammarSpec(GrammarKind.EBNF, "root ::= [a-z]+"), "following it takes more than 1 ms a token"),
        ],
        ids=["memory", "output", "masks"],
    )
    def test_each_is_named_by_which_it_was(self, meagre: GrammarCompiler, spec: GrammarSpec, words: str) -> None:
        assert refusal(meagre.compile(spec)) == f"too complex: {words}"

    @pytest.mark.parametrize(("allowed", "longer"), [((1, 2, 40), [1, 40]), ((2,), [2]), ((2, 33), [33])])
    def test_masks_are_tried_on_an_output_that_does_not_end(
        self, bench: Bench, allowed: tuple[int, ...], longer: list[int]
    ) -> None:
        grammar = bench.regex("a*")
        words = np.zeros(grammar.num_words, dtype=np.int32)
        for token_id in allowed:
            words[token_id // 32] |= 1 << token_id % 32
        assert grammar.end_token_ids == (2,) and _longer(words, grammar).tolist() == longer

    def test_too_little_of_the_machine_is_a_shortage_and_not_kept(self, vocabulary: Vocabulary) -> None:
        limits = CompileLimits(cpu_seconds=600, wall_seconds=0.2)
        compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs, limits=limits)
        compiler.start()
        try:
            spec = endless()
            for _ in range(2):
                error = compiler.compile(spec).exception(PATIENCE)
                assert isinstance(error, Overloaded) and "machine is busy" in error.message
        finally:
            compiler.close()

    @pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE])
    async def test_a_job_that_crashes_is_refused_alone(self, patient: GrammarCompiler, number: signal.Signals) -> None:
        crashing, process = patient.compile(endless()), patient.pid
        [one] = await begun(patient, 1)
        other = patient.compile(endless())
        await begun(patient, 2)
        os.kill(one, number)
        assert number.name in await asyncio.to_thread(refusal, crashing)
        assert not other.done() and process == patient.pid
        assert other.cancel()
        await begun(patient, 0)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    async def test_a_job_that_is_ended_from_outside_is_a_shortage_and_not_kept(
        self, patient: GrammarCompiler, number: signal.Signals
    ) -> None:
        """As the kernel does when the machine has no memory left, perhaps for another process' sake."""
        spec, process = endless(), patient.pid
        for _ in range(2):
            running = patient.compile(spec)
            os.kill(await job_of(patient), number)
            error = await asyncio.to_thread(running.exception, PATIENCE)
            assert isinstance(error, Overloaded) and error.retry_after and "memory" in error.message
        assert await asyncio.to_thread(works, patient, number.name) and process == patient.pid


class TestQueue:
    async def test_full_it_is_a_shortage_and_a_place_that_is_given_back_is_there(
        self, patient: GrammarCompiler
    ) -> None:
        spec = endless()
        waiting = [patient.compile(spec), patient.compile(endless()), patient.compile(endless())]
        error = patient.compile(literal("one")).exception(0)
        assert isinstance(error, Overloaded) and error.retry_after
        # Those who want what is waited for already need no place.
        waiting.append(patient.compile(spec))
        assert waiting.pop(1).cancel()
        assert await asyncio.to_thread(works, patient, "two")
        for future in waiting:
            assert not future.done() and future.cancel()
        await begun(patient, 0)

    async def test_those_who_want_the_same_get_the_same(self, patient: GrammarCompiler) -> None:
        futures = [
            patient.compile(literal("same")),
            patient.compile(literal("same")),
            patient.compile(literal("other")),
        ]
        one, two, three = [await asyncio.to_thread(future.result, PATIENCE) for future in futures]
        assert one is two is not three


class TestProcess:
    async def test_one_that_was_killed_is_started_again(self, patient: GrammarCompiler) -> None:
        assert await asyncio.to_thread(works, patient, "before")
        killed = patient.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert await asyncio.to_thread(works, patient, "after")
        assert patient.pid not in (None, killed)

    async def test_one_that_is_killed_under_a_job_is_started_again_for_it(self, patient: GrammarCompiler) -> None:
        """With those that are set aside for others: nothing of them is left, and all are begun anew."""
        running = [patient.compile(endless()) for _ in range(3)]
        first, killed = await begun(patient, 3), patient.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: not any(map(is_alive, first)))
        await until(lambda: patient.pid not in (None, killed))
        # Whose fault it is nobody knows: it is not tried for ever.
        again, second = await begun(patient, 3), patient.pid
        assert second is not None
        os.kill(second, signal.SIGKILL)
        for future in running:
            error = await asyncio.to_thread(future.exception, PATIENCE)
            assert isinstance(error, Overloaded) and error.retry_after and "not available" in error.message
        await eventually(lambda: not any(map(is_alive, again)))

    async def test_close_ends_it_whatever_it_does(self, vocabulary: Vocabulary) -> None:
        compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs, limits=NEVER_STOPPED)
        # Jobs may come before the start.
        running, other = compiler.compile(endless()), compiler.compile(endless())
        compiler.start()
        jobs, process = await begun(compiler, 2), compiler.pid
        assert process is not None
        await asyncio.to_thread(compiler.close)
        for future in (running, other, compiler.compile(literal("two"))):
            assert isinstance(future.exception(0), Overloaded)
        assert not is_alive(process) and compiler.pid is None
        await eventually(lambda: not any(map(is_alive, jobs)))
        assert not compiler._thread.is_alive()
        compiler.close()

    def test_closed_before_it_was_started_or_up_it_leaves_nothing(self, vocabulary: Vocabulary) -> None:
        before = descriptors()
        for start in (False, True):
            compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs)
            waiting = compiler.compile(literal("one"))
            if start:
                compiler.start()
            compiler.close()
            assert isinstance(waiting.exception(0), Overloaded) and compiler.pid is None
        assert descriptors() == before

    async def test_it_dies_with_a_worker_that_is_killed(self, tmp_path: Path) -> None:
        folder = byte_level_folder(tmp_path / "model")
        command = [sys.executable, "-m", "tests.common.engine.grammar.compiling_parent", str(folder)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220  # read by a thread
        assert worker.stdout is not None
        try:
            process = int(await asyncio.to_thread(worker.stdout.readline))
            await until(lambda: len(children_of(process)) == 3)
            jobs = children_of(process)
        finally:
            worker.kill()
            worker.wait()
            worker.stdout.close()
        await eventually(lambda: not any(map(is_alive, (process, *jobs))))

    def test_one_that_cannot_start_is_a_shortage(self, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("common.engine.grammar.start._MODULE", "no.such.module")
        compiler = GrammarCompiler(vocabulary, on_fatal=no_bugs)
        compiler.start()
        try:
            error = compiler.compile(literal("one")).exception(PATIENCE)
            assert isinstance(error, Overloaded) and "not available" in error.message
        finally:
            compiler.close()

    def test_what_it_prints_stays_out_of_the_workers_output(
        self, compiler: GrammarCompiler, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """The library warns of this one."""
        remote = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"$ref": "http://localhost/schema"}')
        compiler.compile(remote).exception(PATIENCE)
        assert works(compiler, "quiet")
        assert capfd.readouterr() == ("", "")


class TestWithoutAVocabulary:
    def test_each_grammar_is_refused_in_words(self) -> None:
        compiler = GrammarCompiler(None, on_fatal=no_bugs)
        compiler.start()
        assert "takes no grammars" in refusal(compiler.compile(literal("one")))
        assert compiler.pid is None
        compiler.close()


def test_a_bug_of_the_thread_is_told(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("common.engine.grammar.start._MODULE", "no.such.module")
    told: list[BaseException] = []
    heard = threading.Event()

    def on_fatal(error: BaseException) -> None:
        told.append(error)
        heard.set()

    compiler = GrammarCompiler(vocabulary, on_fatal=on_fatal)
    compiler._send_new = None  # type: ignore[method-assign,assignment]
    compiler.start()
    waiting = compiler.compile(literal("one"))
    assert heard.wait(PATIENCE) and isinstance(told[0], TypeError)
    compiler.close()
    assert isinstance(waiting.exception(0), Overloaded)
