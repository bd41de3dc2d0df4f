"""Makes tiny tokenizer folders: byte-level BPE with a ChatML template, and a SentencePiece-like one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = (
    "The capital of France is Paris.",
    "one two three four five six seven eight nine ten",
    "A naïve café in 日本語, 😀🎉 and a smile.",
    "You are a helpful assistant. Say hello, please!",
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def byte_level_folder(
    folder: Path, *, template: str | None = CHATML, special: Sequence[str] = (), **config: Any
) -> Path:
    """A folder as SmolLM2's: no begin token, `<|im_end|>` as end token, one added token that is not special.

    `special`: further special tokens.
    """
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(alphabet), special_tokens=list(SPECIAL), show_progress=False
    )
    library.train_from_iterator(SENTENCES, trainer)
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    library.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    write_json(folder / "tokenizer_config.json", settings | config)
    return folder


def sentencepiece_folder(folder: Path, *, special: Sequence[str] = (), **config: Any) -> Path:
    """A folder as Llama 2's: spaces as U+2581, bytes as `<0xNN>`, a space before the text, a begin token.

    `special`: further special tokens.
    """
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters = sorted({letter for sentence in SENTENCES for letter in sentence if letter.isascii() and letter != " "})
    vocab = {piece: index for index, piece in enumerate([*pieces, *letters, "th", "he", "\u2581t", "\u2581th"])}
    merges = [("t", "h"), ("h", "e"), ("\u2581", "t"), ("\u2581t", "h")]
    library = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>", *special])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "special": True},
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", settings | config)
    return folder
