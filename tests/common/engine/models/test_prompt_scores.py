"""Log probabilities of prompt tokens against transformers' logits, over all ways to cut and to batch a prompt."""

import pytest
import torch

from common.engine import runner as runner_module
from common.engine.batch import SequenceChunk
from common.engine.models.decoder import CausalLM
from common.engine.sampler.logprobs import token_logprobs
from common.sampling import TokenLogprobs
from tests.factories.oracle import TinyModel
from tests.factories.sequences import SequenceDriver, TestSequence, prompt

NUM_TOP = 4
#: Less than a chunk or a block, whole ones, and one more or less.
LENGTHS = (1, 2, 15, 16, 17, 48, 49, 50)


def scored_chunk(driver: SequenceDriver, sequence: TestSequence, length: int | None = None) -> SequenceChunk:
    """The next chunk, with the tokens that follow its positions as targets."""
    chunk = driver.chunk(sequence, length)
    targets = sequence.token_ids[chunk.start + 1 : chunk.end + 1]
    last = chunk.end == len(sequence.token_ids)
    return SequenceChunk(chunk.token_ids, chunk.start, chunk.block_table, last, targets, NUM_TOP)


def scores_of(model: CausalLM, ids: list[int], *, chunk_size: int | None = None, crowd: int = 0) -> list[TokenLogprobs]:
    """In chunks, in a batch with `crowd` strangers: ones that decode, ones that are scored, ones that are not."""
    driver = SequenceDriver(model)
    sequence = driver.sequence(ids)
    entries: list[TokenLogprobs] = []
    while sequence.computed < len(ids):
        before, after = [], []
        for seed in range(crowd):
            stranger = driver.sequence(prompt(3 + seed, model.config.vocab_size, seed=seed))
            (before if seed % 2 else after).append(
                driver.chunk(stranger) if seed % 3 else scored_chunk(driver, stranger)
            )
        chunks = [*before, scored_chunk(driver, sequence, chunk_size), *after]
        logits, scores = driver.runner.run_scored(chunks)
        assert [len(s) for s in scores] == [len(c.targets) for c in chunks]
        assert logits.shape[0] == sum(c.wants_logits for c in chunks)
        entries += scores[len(before)]
    return entries


def oracle_scores(tiny: TinyModel, ids: list[int]) -> list[TokenLogprobs]:
    logits = tiny.oracle.logits(ids)
    return [token_logprobs(logits[i], ids[i + 1], NUM_TOP) for i in range(len(ids) - 1)]


def assert_same_scores(actual: list[TokenLogprobs], expected: list[TokenLogprobs], *, atol: float = 1e-4) -> None:
    assert len(actual) == len(expected)
    for position, (mine, theirs) in enumerate(zip(actual, expected, strict=True), 1):
        candidates = list(zip((mine.chosen, *mine.top), (theirs.chosen, *theirs.top), strict=True))
        for one, other in candidates:
            assert one.token_id == other.token_id, f"position {position}: {mine}, not {theirs}"
            assert one.logprob == pytest.approx(other.logprob, abs=atol), f"position {position}: {mine}, not {theirs}"


@pytest.mark.parametrize("length", LENGTHS)
def test_those_of_transformers(model: CausalLM, tiny: TinyModel, length: int) -> None:
    ids = prompt(length, model.config.vocab_size)
    assert_same_scores(scores_of(model, ids), oracle_scores(tiny, ids))


@pytest.mark.parametrize("chunk_size", [1, 5, 16, 17, 49])
def test_cutting_changes_nothing(model: CausalLM, tiny: TinyModel, chunk_size: int) -> None:
    ids = prompt(50, model.config.vocab_size)
    assert_same_scores(scores_of(model, ids, chunk_size=chunk_size), oracle_scores(tiny, ids))


@pytest.mark.parametrize("crowd", [1, 6])
def test_strangers_change_nothing(model: CausalLM, tiny: TinyModel, crowd: int) -> None:
    ids = prompt(33, model.config.vocab_size)
    assert_same_scores(scores_of(model, ids, chunk_size=16, crowd=crowd), oracle_scores(tiny, ids))


def test_logits_never_come_for_more_rows_than_a_slice(
    model: CausalLM, tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "SCORED_ROWS", 8)
    rows: list[int] = []
    compute = model.logits

    def watched(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return compute(hidden)

    monkeypatch.setattr(model, "logits", watched)
    ids = prompt(50, model.config.vocab_size)
    assert_same_scores(scores_of(model, ids), oracle_scores(tiny, ids))
    assert max(rows) == 8 and sum(rows) == 49 + 1


def test_scores_that_nobody_takes_are_a_broken_invariant(model: CausalLM) -> None:
    driver = SequenceDriver(model)
    with pytest.raises(AssertionError, match="nobody takes"):
        driver.runner.run([scored_chunk(driver, driver.sequence([5, 6, 7]))])
    with pytest.raises(AssertionError, match="more tokens to score"):
        driver.runner.run_scored([SequenceChunk([5], 0, [0], True, [6, 7])])
