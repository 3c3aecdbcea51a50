"""What nodes are told at start, and requests with known answers, for tests of whole nodes."""

from dataclasses import dataclass, field
from pathlib import Path

from pdserve.core.config import DecodeConfig, KvTransferConfig, PrefillConfig
from pdserve.core.model_spec import ModelSpec, RopeSpec
from pdserve.core.node import NodeSpec, Role
from pdserve.core.request import FinishReason, Request, Route, SamplingParams
from pdserve.core.timeline import Timeline
from tests.oracle import FakeModel
from tests.prompts import VOCAB_SIZE, make_prompt

EOS = 60

MODEL = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    rms_norm_eps=1e-5,
    rope=RopeSpec(theta=10000.0),
    tie_word_embeddings=True,
    max_position=400,
    sliding_window=None,
    hidden_act="silu",
    attention_bias=False,
    mlp_bias=False,
    bos_token_id=None,
    eos_token_ids=(EOS,),
    fingerprint="f00d",
)


def make_spec(
    name: str,
    pool: PrefillConfig | DecodeConfig,
    *,
    start: int = 1,
    block_size: int = 4,
    depth: int = 1,
    dtype: str = "float32",
    model: ModelSpec = MODEL,
    port_range: tuple[int, int] | None = None,
    model_dir: Path | None = None,
) -> NodeSpec:
    """``start`` counts the incarnations of a name."""
    return NodeSpec(
        name=name,
        role=Role.PREFILL if isinstance(pool, PrefillConfig) else Role.DECODE,
        incarnation=f"{name}#{start}",
        host="127.0.0.1",
        port_range=port_range,
        model=model,
        dtype=dtype,
        kv_dtype=dtype,
        block_size=block_size,
        max_model_len=None,
        model_dir=model_dir,
        pool=pool,
        kv_transfer=KvTransferConfig(),
        transport="grpc",
        depth=depth,
    )


@dataclass(eq=False)
class Asked:
    """One request: what is right, and what has come."""

    request: Request
    expected: dict[int, list[int]]  # all output tokens of each choice
    got: dict[int, list[int]]  # at first what the client had before this attempt
    ended: dict[int, FinishReason] = field(default_factory=dict)
    failure: str | None = None  # its kind
    failure_message: str = ""
    retryable: bool = False
    timelines: list[Timeline] = field(default_factory=list)
    num_scored: int = 1  # tokens of the prompt up to which log-probabilities are known
    unwanted: bool = False  # aborted, or its router is gone: nothing more may come
    given_up: bool = False  # its abort is on the way: something may come or not

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what has come of the first choice."""
        return (*self.request.token_ids[: self.request.prompt_len], *self.got[0])

    @property
    def is_ended(self) -> bool:
        """The node has said the last of it."""
        return len(self.ended) == len(self.expected) or self.failure is not None

    @property
    def is_over(self) -> bool:
        return self.is_ended or self.unwanted or self.given_up


def ask(
    model: FakeModel,
    number: int,
    *,
    prompt_len: int,
    max_tokens: int,
    prefill_nodes: tuple[str, ...] = (),
    local_allowed: bool = True,
    num_choices: int = 1,
    num_had: int = 0,
    min_tokens: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    penalty: float = 0.0,
    max_model_len: int = MODEL.max_position,
    num_alike: int = 0,
    after: tuple[int, ...] = (),
    cache_salt: bytes = b"",
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    lane: int = 0,
) -> Asked:
    """A request like no other; with ``num_had`` a retry for a client that has so many tokens.

    The first ``num_alike`` tokens are those of others (``make_prompt``); with ``after`` they follow
    those of a conversation.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        seed=number,
        stop_token_ids=stop_token_ids,
        presence_penalty=penalty,
        logprobs=logprobs,
        prompt_logprobs=None if num_had else prompt_logprobs,  # as a router has it
    )
    own = make_prompt(number, prompt_len, num_alike=num_alike)
    prompt = (*after, *own)[:prompt_len]
    answers = {
        choice: model.answer(
            prompt,
            sampling,
            choice,
            prompt_len=prompt_len,
            end_token_ids=(*MODEL.eos_token_ids, *stop_token_ids),
            max_len=min(prompt_len + max_tokens, max_model_len),
        )
        for choice in range(num_choices)
    }
    if num_had:  # the choices of one attempt have the same tokens: a retry has one choice
        answers = {0: answers[0]}
    num_had = max(0, min(num_had, len(answers[0]) - 1))
    had = answers[0][:num_had] if num_had else []
    request = Request(
        request_id=f"r{number}",
        attempt=1 if num_had else 0,
        token_ids=(*prompt, *had),
        prompt_len=prompt_len,
        choices=tuple(answers),
        sampling=sampling,
        route=Route(
            decode_node="decode-0",
            prefill_nodes=prefill_nodes,
            local_allowed=local_allowed,
            lane=lane,
        ),
        cache_salt=cache_salt,
    )
    return Asked(request, answers, {choice: list(had) for choice in answers})
