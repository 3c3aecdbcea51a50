"""Tiny tokenizers of the kinds that models come with, and text in many scripts."""

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

SAMPLES = [
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces, a tab\tand\n\nblank lines  \r\n",
    "def f(x):\n    return x**2  # ümläut",
    "Привет, как дела? Ελληνικά και Հայերեն.",
    "你好,世界。日本語のテキストと한국어 문장도 있다。",
    "مرحبا بالعالم — שלום עולם — سلام دنیا",
    "नमस्ते दुनिया, স্বাগতম, வணக்கம், ನಮಸ್ಕಾರ, สวัสดีชาวโลก, မင်္ဂလာပါ, ជំរាបសួរ",
    "ሰላም ለዓለም ᐃᓄᒃᑎᑐᑦ ᏣᎳᎩ ꦗꦮ 𐌰𐌱𐌲 𒀀𒁀 𓀀𓁐 \U0001d518\U0001d52b\U0001d526",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🇺🇳🇪🇺, 1️⃣, ❤️",
    "é vs é; ﷽; Z̴̢͚̎a̷l̸g̵o; \u200bzero width; \u2028line",
    "<not special> [INST] ▁ Ġ <0x41> \x00\x07",
    "",
]


def every_block() -> str:
    """A character of each 64 code points that UTF-8 can hold."""
    points = (p for p in range(0x20, 0x110000, 61) if not 0xD800 <= p < 0xE000)
    return "".join(map(chr, points))


def byte_level(vocab_size: int = 600) -> Tokenizer:
    """As SmolLM2, GPT-2, Llama 3, Qwen: bytes written as printable characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|start|>", "<|a b|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLES * 2, trainer)
    tokenizer.add_tokens([AddedToken("<plain added>", normalized=False), "größer"])
    return tokenizer


def byte_fallback(*, strips: bool = True) -> Tokenizer:
    """As Llama 2 and Mistral (``strips``) or Gemma: characters, and bytes for the rare ones."""
    learned = Tokenizer(models.BPE())
    learned.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=200, limit_alphabet=80, special_tokens=["<unk>"], show_progress=False
    )
    # No piece looks like the beginning of a byte's: those models have none, and grammars need that.
    texts = [s.replace(" ", " ▁").replace("<0x", "") for s in SAMPLES]
    learned.train_from_iterator(texts, trainer)
    model = json.loads(learned.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [piece for piece in model["vocab"] if piece not in pieces]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if strips:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def with_half_a_byte() -> Tokenizer:
    """``byte_fallback`` with a piece that looks like a byte's and is none."""
    content = json.loads(byte_fallback().to_str())
    content["model"]["vocab"]["<0x"] = len(content["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(content))


def metaspace() -> Tokenizer:
    """As older conversions from sentencepiece: the Metaspace decoder drops the first space."""
    tokenizer = byte_fallback()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: words with spaces between."""
    names = ["<unk>", "The", "quick", "fox", "."]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback, spaces kept": lambda: byte_fallback(strips=False),
    "metaspace": metaspace,
    "words": words,
}


def save(directory: Path, backend: Tokenizer, **config: Any) -> Path:
    """A model directory's text files."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    content = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (directory / "tokenizer_config.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
