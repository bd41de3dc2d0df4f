"""The served model as the edges see it: names, tokenizer, template, defaults. No weights, no workers."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from common.errors import ContextTooLong, NotFound
from common.text.chat_template import ChatTemplate
from common.text.tokenizer import Tokenizer
from common.text.tokenizer_files import read_json
from gateway.chat.reasoning import reasons
from gateway.chat.tools.choose import choose_tool_format
from gateway.chat.tools.format import ToolFormat

GENERATION_CONFIG_FILE = "generation_config.json"
#: Room for normalizers that make a text shorter before it is cut into tokens.
_NORMALIZER_SLACK = 4
#: Characters of an unknown name that a complaint repeats.
_SHOWN_NAME = 128


@dataclass(frozen=True)
class GenerationDefaults:
    """What a request gets where it says nothing: the model's `generation_config.json`, else the neutral value."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Reads the fields of the same names; everything else in the file is for other programs."""
        config = read_json(folder / GENERATION_CONFIG_FILE)

        def number(name: str, default: float) -> float:
            value = config.get(name)
            return float(value) if isinstance(value, int | float) else default

        return cls(
            temperature=number("temperature", cls.temperature),
            top_p=number("top_p", cls.top_p),
            top_k=int(number("top_k", cls.top_k)),
            min_p=number("min_p", cls.min_p),
            repetition_penalty=number("repetition_penalty", cls.repetition_penalty),
        )


@dataclass(frozen=True, slots=True)
class ServingModel:
    """One model under its name."""

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: GenerationDefaults = GenerationDefaults()
    #: Unix seconds, shown by /v1/models.
    created: int = 0
    #: How it writes tool calls; None: unknown or switched off.
    tool_format: ToolFormat | None = None
    #: It may think in `<think>` before it answers.
    reasoning: bool = False

    @classmethod
    def load(cls, folder: Path, name: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Self:
        """Reads the text side of a Hugging Face folder.

        Args:
            tool_parser: one of TOOL_PARSERS.
            reasoning_parser: one of REASONING_PARSERS.

        Raises ModelError if the folder is not usable, ConfigError for an unknown parser.
        """
        tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
        return cls(
            name=name,
            tokenizer=tokenizer,
            template=template,
            tool_format=choose_tool_format(tool_parser, template),
            reasoning=reasons(reasoning_parser, template, tokenizer),
            defaults=GenerationDefaults.load(folder),
            created=int(time.time()),
        )

    def check_name(self, name: str | None) -> str:
        """The name to answer with; a request without one means the served model. Raises NotFound."""
        if not name:
            return self.name
        if name != self.name:
            raise NotFound(f"the model {name[:_SHOWN_NAME]!r} does not exist", field="model", code="model_not_found")
        return name

    def check_length(self, characters: int, max_tokens: int, *, field: str) -> None:
        """Raises ContextTooLong for a text that cannot fit, before work is spent on it."""
        if characters > max_tokens * self.tokenizer.longest_token * _NORMALIZER_SLACK:
            raise ContextTooLong(f"{field} has {characters} characters; at most {max_tokens} tokens fit", field=field)

    def encode_text(self, text: str, max_tokens: int, *, field: str) -> list[int]:
        """Ids of a prompt given as text. Raises ContextTooLong."""
        self.check_length(len(text), max_tokens, field=field)
        return self.tokenizer.encode(text)
