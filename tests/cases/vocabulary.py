"""What token ids of SmolLM2 in the cases mean, said in ids of another model. Knows no request."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

#: Texts whose first token the cases name by its id. Of the emoji it is half the character, in both models.
FIRST_TOKENS = {17: "!", 107: "{", 109: "}", 7042: " Paris", 10813: "😀"}
#: Prompts that the cases give as ids.
PROMPTS = {(504, 3575, 282, 4649, 314): "The capital of France is", (537, 827, 1296): "one two three"}
VOCABULARY = 49152


@dataclass(frozen=True)
class Vocabulary:
    """Ids of one model for those of SmolLM2; what is not in the tables is the same in both, as the end token 2 is."""

    ids: dict[int, int] = field(default_factory=dict)
    prompts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Path) -> Self:
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        first = {id_: tokenizer.encode(text).ids[0] for id_, text in FIRST_TOKENS.items()}
        size = tokenizer.get_vocab_size()
        ends = {VOCABULARY - 1: size - 1, VOCABULARY: size}
        return cls({**first, **ends}, {ids: tokenizer.encode(text).ids for ids, text in PROMPTS.items()})

    def said(self, field_: str, value: object) -> object:
        """`value` of the body's field `field_`."""
        if field_ == "stop_token_ids" and isinstance(value, list):
            return [self.ids.get(id_, id_) for id_ in value]
        if field_ == "logit_bias" and isinstance(value, dict):
            return {self._key(key): bias for key, bias in value.items()}
        if field_ == "prompt" and isinstance(value, list):
            return self.prompts.get(tuple(value), value) if _is_ids(value) else [self.said(field_, v) for v in value]
        return value

    def _key(self, key: str) -> str:
        return str(self.ids.get(int(key), key)) if key.isdecimal() else key


def _is_ids(value: list[object]) -> bool:
    return all(isinstance(item, int) for item in value)


def word_biases(model: Path, bias: float = 100.0) -> dict[str, float]:
    """A `logit_bias` that leaves nothing but tokens of several ASCII letters, a space among them at most.

    Texts of a model with random weights are half characters else, at which no text can be cut.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = {id_: tokenizer.decode([id_]) for id_ in range(tokenizer.get_vocab_size())}
    return {
        str(id_): bias for id_, text in texts.items() if len(text) > 2 and text.isascii() and text.strip().isalpha()
    }
