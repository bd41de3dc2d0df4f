"""A tiny random model that a whole system can serve: weights, tokenizer and chat template in one folder."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from tests.common.text.model_folders import byte_level_folder
from tests.factories.models import write_tiny_model

#: Longest context in tokens.
MAX_LENGTH = 2048
#: `<|im_end|>` of the tokenizer.
END_TOKEN_ID = 2
#: Options of a worker with this model: many blocks, and slots so small that a prompt takes several messages.
WORKER_MEMORY = {"--kv-memory": "32MiB", "--staging-memory": "2MiB", "--slot-bytes": "32KiB"}


def write_served_model(folder: Path, *, seed: int = 0, num_layers: int = 4) -> PreTrainedModel:
    """Fill `folder` with a Llama of random weights and a byte-level tokenizer with a ChatML template.

    Its texts make no sense, but they are a function of prompt and seed. Returns transformers' own model, in fp32.
    """
    byte_level_folder(folder)
    # The embedding has a row for each token that the tokenizer knows, and no more.
    vocab_size = _vocab_size(folder)
    return write_tiny_model(
        folder,
        "llama3",
        seed=seed,
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=1,
        eos_token_id=END_TOKEN_ID,
    )


def _vocab_size(folder: Path) -> int:
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = [token["id"] for token in tokenizer["added_tokens"]]
    return 1 + max(*tokenizer["model"]["vocab"].values(), *added)
