"""Logits and greedy tokens of every architecture against transformers, in fp32, over all ways to run a prompt."""

import pytest
import torch
from torch import Tensor

from common.engine.kernels.reference import ReferenceKernels
from common.engine.models.decoder import CausalLM
from tests.factories.oracle import TinyModel
from tests.factories.sequences import SequenceDriver, prompt

BLOCK_SIZE = 16
#: One token, whole blocks, and one more or less.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 50)


def assert_same_logits(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=2e-4)
    assert actual.argmax(-1).equal(expected.argmax(-1))


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_after_a_prompt(model: CausalLM, tiny: TinyModel, length: int) -> None:
    ids = prompt(length, model.config.vocab_size)
    driver = SequenceDriver(model)
    assert_same_logits(driver.prefill(driver.sequence(ids)), tiny.oracle.logits(ids)[-1])


@pytest.mark.parametrize(("chunk_size", "block_size"), [(1, 16), (5, 4), (16, 16), (24, 16), (24, 32), (49, 4)])
def test_logits_after_each_chunk(model: CausalLM, tiny: TinyModel, chunk_size: int, block_size: int) -> None:
    ids = prompt(50, model.config.vocab_size)
    expected = tiny.oracle.logits(ids)
    driver = SequenceDriver(model, block_size=block_size)
    sequence = driver.sequence(ids)
    while sequence.computed < len(ids):
        logits = driver.runner.run([driver.chunk(sequence, chunk_size)])
        assert_same_logits(logits[0], expected[sequence.computed - 1])


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_tokens(model: CausalLM, tiny: TinyModel, length: int) -> None:
    ids = prompt(length, model.config.vocab_size, seed=1)
    driver = SequenceDriver(model, block_size=BLOCK_SIZE)
    assert driver.greedy(driver.sequence(ids), 18, chunk_size=24) == tiny.oracle.greedy(ids, 18)


def test_logits_batched_with_strangers(model: CausalLM, tiny: TinyModel) -> None:
    """Decodes, first chunks and later chunks of several sequences in one pass, not all of them wanting logits."""
    driver = SequenceDriver(model)
    prompts = [prompt(length, model.config.vocab_size, seed=length) for length in (40, 1, 17, 33, 16, 70)]
    sequences = [driver.sequence(ids) for ids in prompts]
    for sequence, length in ((sequences[0], 39), (sequences[3], 20), (sequences[5], 1)):
        driver.runner.run([driver.chunk(sequence, length)])
    chunks = [driver.chunk(s, 25, wants_logits=i != 2) for i, s in enumerate(sequences)]
    assert [len(c.token_ids) for c in chunks] == [1, 1, 17, 13, 16, 25]

    logits = driver.runner.run(chunks)

    wanted = [i for i in range(len(sequences)) if i != 2]
    for row, i in enumerate(wanted):
        assert_same_logits(logits[row], tiny.oracle.logits(prompts[i])[sequences[i].computed - 1])


def test_greedy_tokens_in_a_batch(model: CausalLM, tiny: TinyModel) -> None:
    driver = SequenceDriver(model, block_size=4)
    prompts = [prompt(length, model.config.vocab_size, seed=length) for length in (3, 20, 9, 1)]
    sequences = [driver.sequence(ids) for ids in prompts]
    for _ in range(10):
        logits = driver.runner.run([driver.chunk(s) for s in sequences])
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token)
    for sequence, ids in zip(sequences, prompts, strict=True):
        assert sequence.token_ids[len(ids) :] == tiny.oracle.greedy(ids, 10)


@pytest.mark.parametrize("suffix", [1, 7, 16, 20])
def test_a_warm_prefix_changes_nothing(model: CausalLM, tiny: TinyModel, suffix: int) -> None:
    driver = SequenceDriver(model)
    first = driver.sequence(prompt(45, model.config.vocab_size))
    driver.prefill(first)
    ids = first.token_ids[: 2 * BLOCK_SIZE] + prompt(suffix, model.config.vocab_size, seed=9)
    second = driver.sequence(ids, prefix_of=first, shared=2)
    assert second.computed == 32
    assert driver.greedy(second, 6) == tiny.oracle.greedy(ids, 6)


def test_a_forked_partial_block_goes_its_own_way(model: CausalLM, tiny: TinyModel) -> None:
    driver = SequenceDriver(model)
    ids = prompt(21, model.config.vocab_size)
    trunk = driver.sequence(ids)
    driver.prefill(trunk)
    branch = driver.sequence([*ids, 7], prefix_of=trunk, shared=1)
    branch.block_table.append(driver.allocate())
    driver.kv_cache.copy_block(trunk.block_table[1], branch.block_table[1])
    branch.computed = len(ids)
    trunk.token_ids.append(11)

    logits = driver.runner.run([driver.chunk(trunk), driver.chunk(branch)])

    assert_same_logits(logits[0], tiny.oracle.logits([*ids, 11])[-1])
    assert_same_logits(logits[1], tiny.oracle.logits([*ids, 7])[-1])


def test_all_positions_up_to_the_longest(model: CausalLM, tiny: TinyModel) -> None:
    ids = prompt(model.config.max_length, model.config.vocab_size)
    driver = SequenceDriver(model)
    assert_same_logits(driver.prefill(driver.sequence(ids), chunk_size=200), tiny.oracle.logits(ids)[-1])


def assert_same_row(model: CausalLM, actual: Tensor, expected: Tensor) -> None:
    """To the bit, where the kernels promise it."""
    exact = not isinstance(model.kernels, ReferenceKernels)
    torch.testing.assert_close(actual, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 2e-4)


def test_a_row_does_not_depend_on_its_neighbours(model: CausalLM) -> None:
    ids = prompt(30, model.config.vocab_size)
    alone, crowded = SequenceDriver(model), SequenceDriver(model)
    expected = alone.prefill(alone.sequence(ids))
    others = [crowded.chunk(crowded.sequence(prompt(n, 300, seed=n)), wants_logits=False) for n in (5, 40)]
    logits = crowded.runner.run([others[0], crowded.chunk(crowded.sequence(ids)), others[1]])
    assert_same_row(model, logits[0], expected)


@pytest.mark.parametrize("chunk_size", [1, 7, 16])
def test_a_row_does_not_depend_on_the_chunks_before_it(model: CausalLM, chunk_size: int) -> None:
    ids = prompt(40, model.config.vocab_size)
    whole, chunked = SequenceDriver(model), SequenceDriver(model)
    expected = whole.prefill(whole.sequence(ids))
    assert_same_row(model, chunked.prefill(chunked.sequence(ids), chunk_size), expected)
