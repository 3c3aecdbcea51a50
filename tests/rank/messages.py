"""Hypothesis strategies for everything that goes over the rings."""

from dataclasses import fields
from typing import get_args, get_type_hints

from hypothesis import strategies as st

from kv_transfer.commands import KvCommand, KvEvent, Peer
from pdserve.core.kv_layout import KvLayout
from pdserve.core.request import HandoffId, PromptLogprob, SamplingParams, TokenLogprobs
from pdserve.engine.batch import (
    Batch,
    BlockCopy,
    Carried,
    Chunk,
    Joined,
    Sampled,
    Scored,
    StepOutput,
    TokenMask,
)
from pdserve.rank.messages import Pulse, RankFailed, RankReady, Stop

integers = st.integers(-(2**63), 2**63 - 1)
ids = st.integers(0, 2**40)
many = st.lists(ids, max_size=5).map(tuple)
floats = st.floats(allow_nan=False)
text = st.text(max_size=20)  # without surrogates: hypothesis makes text that UTF-8 can hold

layouts = st.builds(
    KvLayout,
    num_layers=ids,
    num_kv_heads=st.sampled_from((1, 2, 4, 8)),
    head_size=ids,
    block_size=ids,
    dtype=st.sampled_from(("float32", "bfloat16")),
    tp_size=st.sampled_from((1, 2, 4, 16)),
)
handoffs = st.builds(HandoffId, text, ids, ids)
peers = st.builds(
    Peer,
    peer_id=text,
    layout=layouts,
    transport=text,
    addresses=st.lists(text, max_size=3).map(tuple),
)
pairs = st.lists(st.tuples(ids, floats), max_size=4).map(tuple)
samplings = st.builds(
    SamplingParams,
    max_tokens=ids,
    min_tokens=ids,
    temperature=floats,
    top_p=floats,
    top_k=st.none() | ids,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    logit_bias=pairs,
    seed=integers,
    stop_token_ids=many,
    ignore_eos=st.booleans(),
    logprobs=st.none() | ids,
    prompt_logprobs=st.none() | ids,
)
joineds = st.builds(
    Joined,
    slot=ids,
    sampling=samplings,
    choices=many,
    end_token_ids=many,
    prompt_len=ids,
    history=many,
    blocks=many,
)
chunks = st.builds(
    Chunk, slot=ids, start=ids, tokens=many | st.just(Carried()), new_blocks=many, num_samples=ids
)
batches = st.builds(
    Batch,
    step=ids,
    joined=st.lists(joineds, max_size=2).map(tuple),
    left=many,
    copies=st.lists(st.builds(BlockCopy, source=ids, destination=ids), max_size=3).map(tuple),
    chunks=st.lists(chunks, max_size=5).map(tuple),
    masks=st.lists(st.builds(TokenMask, slot=ids, bits=st.binary(max_size=9)), max_size=3).map(
        tuple
    ),
)
token_logprobs = st.builds(TokenLogprobs, logprob=floats, top=pairs)
prompt_logprobs = st.builds(PromptLogprob, logprob=floats, rank=ids, top=pairs)
outputs = st.builds(
    StepOutput,
    step=ids,
    sampled=st.lists(
        st.builds(Sampled, tokens=many, logprobs=st.lists(token_logprobs, max_size=3).map(tuple)),
        max_size=5,
    ).map(tuple),
    scored=st.lists(
        st.builds(
            Scored, chunk=ids, start=ids, logprobs=st.lists(prompt_logprobs, max_size=3).map(tuple)
        ),
        max_size=3,
    ).map(tuple),
    device_s=st.none() | floats,
)

_BY_TYPE = {
    int: integers,
    bool: st.booleans(),
    str: text,
    HandoffId: handoffs,
    Peer: peers,
    KvLayout: layouts,
}


def _message(kind: type) -> st.SearchStrategy[object]:
    hints = get_type_hints(kind)
    return st.builds(
        kind, **{each.name: _BY_TYPE.get(hints[each.name], many) for each in fields(kind)}
    )


rare = st.one_of(
    *map(_message, (*get_args(KvCommand), *get_args(KvEvent), RankReady, Pulse, RankFailed, Stop))
)
messages = batches | outputs | rare
