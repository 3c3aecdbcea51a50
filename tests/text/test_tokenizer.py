"""The tokenizer of a model directory: ids, bytes, special tokens, and files that are wrong."""

import json
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from pdserve.core.errors import InvalidRequestError, ModelFilesError
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny_models import KINDS, SAMPLES, byte_fallback, byte_level, every_block, save


def reference(directory):
    """The same directory as Hugging Face's library loads it."""
    return PreTrainedTokenizerFast.from_pretrained(directory)


# ----------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("text", [*SAMPLES, every_block()])
def test_byte_level_text_survives_the_way_there_and_back(tokenizers_by_kind, text):
    tokenizer = tokenizers_by_kind["byte level"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "words"])
@pytest.mark.parametrize("text", [*SAMPLES, every_block()])
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizers_by_kind, kind, text):
    tokenizer = tokenizers_by_kind[kind]
    content = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))
    if kind != "byte level":
        text = text.replace("▁", " ")
    starts_with_mark = kind == "byte fallback" or (kind == "metaspace" and text[:1] != " ")
    assert content == (" " * (starts_with_mark and text != "") + text).encode()


def test_parts_of_characters_have_bytes_and_a_replacement_character_as_text(tokenizers_by_kind):
    for kind in ("byte level", "byte fallback"):
        tokenizer = tokenizers_by_kind[kind]
        last = tokenizer.encode("🧿")[-1]  # in no sample: nothing was merged for it
        assert tokenizer.token_bytes(last) == b"\xbf"
        assert tokenizer.token_text(last) == "\ufffd"


def test_special_and_unknown_tokens_have_text_too(tokenizers_by_kind):
    tokenizer = tokenizers_by_kind["byte level"]
    (token_id,) = tokenizer.encode("<|a b|>")
    assert tokenizer.token_text(token_id) == "<|a b|>"
    assert tokenizer.is_special(token_id)
    assert not tokenizer.is_special(tokenizer.encode("fox")[0])
    beyond = tokenizer.vocab_size
    assert tokenizer.token_bytes(beyond) == b""
    assert tokenizer.token_text(beyond) == ""
    assert tokenizer.decode([beyond, *tokenizer.encode("fox")]) == "fox"


def test_every_token_has_text(tokenizers_by_kind):
    for tokenizer in tokenizers_by_kind.values():
        assert all(tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size))
        assert tokenizer.pieces([tokenizer.vocab_size], skip_special_tokens=False) == []


def test_lone_surrogates_are_refused_by_field(tokenizers_by_kind):
    with pytest.raises(InvalidRequestError, match="messages: not valid Unicode") as caught:
        tokenizers_by_kind["byte level"].encode("a\ud800b", field="messages")
    assert caught.value.field == "messages"


def test_settings_for_training_do_not_cut_or_pad(tmp_path):
    backend = byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer(save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(SAMPLES[0])) == SAMPLES[0]


# ---------------------------------------------------------------------------------- special tokens


ADDED = [None, True, False]


@pytest.mark.parametrize("has_template", [True, False])
@pytest.mark.parametrize("bos", ADDED)
@pytest.mark.parametrize("eos", ADDED)
def test_bos_and_eos_are_added_as_hugging_face_adds_them(tmp_path, has_template, bos, eos):
    backend = byte_fallback()
    if has_template:
        backend.post_processor = TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    flags = {"add_bos_token": bos, "add_eos_token": eos}
    config: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    save(tmp_path, backend, bos_token="<s>", eos_token="</s>", **config)
    ours, theirs = Tokenizer(tmp_path), reference(tmp_path)
    for text in ("The quick fox", ""):
        for add in (True, False):
            expected = theirs.encode(text, add_special_tokens=add)
            assert ours.encode(text, add_special_tokens=add) == expected
    assert (ours.bos_token_id, ours.eos_token_id) == (1, 2)


@pytest.mark.parametrize("as_object", [True, False])
def test_special_tokens_are_found_in_either_file(tmp_path, as_object):
    save(tmp_path, byte_level(), eos_token=None)
    end = {"content": "<|end|>", "lstrip": False} if as_object else "<|end|>"
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.special_tokens == {"eos_token": "<|end|>"}
    assert tokenizer.eos_token_id == 0
    assert tokenizer.bos_token_id is None


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path):
    backend = byte_level()
    next_id = backend.get_vocab_size()
    declared = {
        str(next_id): {"content": "<|new|>", "special": True},
        str(next_id + 1): {"content": "<tool>", "special": False, "normalized": False},
    }
    save(tmp_path, backend, added_tokens_decoder=declared, eos_token="<|new|>")
    ours, theirs = Tokenizer(tmp_path), reference(tmp_path)
    token_ids = ours.encode("a<|new|> <tool>b")
    assert token_ids == theirs.encode("a<|new|> <tool>b")
    assert {next_id, next_id + 1} <= set(token_ids)
    assert ours.is_special(next_id)
    assert not ours.is_special(next_id + 1)
    for skip in (True, False):
        expected = theirs.decode(token_ids, skip_special_tokens=skip)
        assert ours.decode(token_ids, skip_special_tokens=skip) == expected


def test_a_plain_token_becomes_special_where_the_configuration_names_it(tmp_path):
    backend = byte_level()
    backend.add_tokens([AddedToken("<eot>", normalized=False)])
    tokenizer = Tokenizer(save(tmp_path, backend, eos_token="<eot>"))
    assert tokenizer.eos_token_id is not None
    assert tokenizer.is_special(tokenizer.eos_token_id)
    assert tokenizer.decode(tokenizer.encode("fox<eot>")) == "fox"


def test_a_named_token_without_an_id_gets_none(tmp_path):
    tokenizer = Tokenizer(save(tmp_path, byte_level(), pad_token="<pad>", bos_token="<bos>"))
    assert tokenizer.bos_token_id is None
    assert tokenizer.vocab_size == byte_level().get_vocab_size()


# ------------------------------------------------------------------------------------- wrong files


def test_a_missing_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer.json", b'{"version": "1.0", "model": {"type": "Unheard"}}'),
        ("tokenizer_config.json", b"nonsense"),
        ("tokenizer_config.json", b'{"bos_token": {"no": "content"}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": ["x"]}'),
        ("special_tokens_map.json", b"{"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content):
    save(tmp_path, byte_level())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match=name.replace(".", r"\.")):
        Tokenizer(tmp_path)


def test_a_decoder_that_is_not_known_is_named(tmp_path):
    content = json.loads(byte_level().to_str())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    save(tmp_path, byte_level())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json.*WordPiece"):
        Tokenizer(tmp_path)
