"""A random llama that is small to load and slow enough to be caught in each phase of a request."""

from functools import cache
from pathlib import Path

from common.text.tokenizer import Tokenizer
from tests.common.text.model_folders import byte_level_folder
from tests.factories.models import write_tiny_model
from tests.factories.oracle import Oracle, TinyModel

MAX_LENGTH = 4096


@cache
def slow_model(folder: Path, *, seed: int = 0) -> TinyModel:
    """Write it into `folder`: on one core about 1 ms a prompt token and 10 ms a step; 16 KiB of KV a token."""
    byte_level_folder(folder)
    model = write_tiny_model(
        folder,
        "llama2",
        seed=seed,
        vocab_size=Tokenizer.load(folder).vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=MAX_LENGTH,
    )
    # The judge goes on behind an end token, as requests with `ignore_eos` do.
    model.generation_config.eos_token_id = None
    return TinyModel(folder, Oracle(model))
