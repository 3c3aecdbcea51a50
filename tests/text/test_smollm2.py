"""The real small model's tokenizer and chat template, against what another implementation made."""

import json
import random
from pathlib import Path

import pytest

from pdserve.text.chat_template import ChatTemplate
from pdserve.text.detokenizer import StreamDetokenizer
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import SAMPLES, every_block

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parent.parent / "data" / "golden_chat.json"
CASES = json.loads(GOLDEN.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Tokenizer:
    return Tokenizer(smollm2_dir)


@pytest.mark.parametrize("case", CASES, ids=[case["prompt"][:30] for case in CASES])
def test_chat_prompts_have_the_golden_ids_and_answers_the_golden_text(smollm2_dir, tokenizer, case):
    prompt = ChatTemplate(smollm2_dir).render([{"role": "user", "content": case["prompt"]}])
    assert tokenizer.encode(prompt, add_special_tokens=False) == case["prompt_token_ids"]
    stream = StreamDetokenizer(tokenizer, after=case["prompt_token_ids"])
    text = "".join(stream.push([token_id]) for token_id in case["output_token_ids"])
    assert text + stream.flush() == case["text"]


def test_the_special_tokens_are_the_chat_s(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.encode("fox") == tokenizer.encode("fox", add_special_tokens=False)
    assert tokenizer.decode([1, *tokenizer.encode("fox"), 2]) == "fox"


@pytest.mark.parametrize("text", SAMPLES)
def test_text_in_many_scripts_streams_back(tokenizer, text):
    token_ids = tokenizer.encode(text)
    stream = StreamDetokenizer(tokenizer)
    pieces = [stream.push([token_id]) for token_id in token_ids]
    assert "".join(pieces) + stream.flush() == tokenizer.decode(token_ids) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_of_every_block_streams_as_it_is_decoded_at_once(tokenizer):
    token_ids = tokenizer.encode(every_block())  # the vocabulary lacks some bytes: not all is there
    stream = StreamDetokenizer(tokenizer)
    text = "".join(stream.push([token_id]) for token_id in token_ids) + stream.flush()
    assert text == tokenizer.decode(token_ids)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("skip", [True, False])
def test_random_tokens_stream_as_they_are_decoded_at_once(tokenizer, seed, skip):
    token_ids = random.Random(seed).choices(range(tokenizer.vocab_size), k=500)
    stream = StreamDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(stream.push([token_id]) for token_id in token_ids) + stream.flush()
    assert text == tokenizer.decode(token_ids, skip_special_tokens=skip)
