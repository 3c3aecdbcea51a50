from pdserve.rpc.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "abort", "heartbeat", "end_choice")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    END_CHOICE_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: NodeRequest
    abort: RequestKey
    heartbeat: Heartbeat
    end_choice: ChoiceKey
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[NodeRequest, _Mapping]] = ..., abort: _Optional[_Union[RequestKey, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., end_choice: _Optional[_Union[ChoiceKey, _Mapping]] = ...) -> None: ...

class DecodeMessage(_message.Message):
    __slots__ = ("welcome", "outputs", "status")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    welcome: NodeWelcome
    outputs: StepOutputs
    status: NodeStatus
    def __init__(self, welcome: _Optional[_Union[NodeWelcome, _Mapping]] = ..., outputs: _Optional[_Union[StepOutputs, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "protocol_version", "model_fingerprint")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    model_fingerprint: str
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class ChoiceKey(_message.Message):
    __slots__ = ("request_id", "attempt", "choice")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("decode_node", "prefill_nodes", "local_allowed", "lane")
    DECODE_NODE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    decode_node: str
    prefill_nodes: _containers.RepeatedScalarFieldContainer[str]
    local_allowed: bool
    lane: int
    def __init__(self, decode_node: _Optional[str] = ..., prefill_nodes: _Optional[_Iterable[str]] = ..., local_allowed: _Optional[bool] = ..., lane: _Optional[int] = ...) -> None: ...

class NodeRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "token_ids", "prompt_len", "choices", "sampling", "route", "cache_salt", "traceparent", "grammar")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: NodeSampling
    route: Route
    cache_salt: bytes
    traceparent: str
    grammar: NodeGrammar
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[NodeSampling, _Mapping]] = ..., route: _Optional[_Union[Route, _Mapping]] = ..., cache_salt: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., grammar: _Optional[_Union[NodeGrammar, _Mapping]] = ...) -> None: ...

class NodeGrammar(_message.Message):
    __slots__ = ("kind", "text", "field")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    field: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ..., field: _Optional[str] = ...) -> None: ...

class NodeSampling(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias_ids", "logit_bias_values", "seed", "stop_token_ids", "ignore_eos", "logprobs", "prompt_logprobs")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_VALUES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias_ids: _containers.RepeatedScalarFieldContainer[int]
    logit_bias_values: _containers.RepeatedScalarFieldContainer[float]
    seed: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias_ids: _Optional[_Iterable[int]] = ..., logit_bias_values: _Optional[_Iterable[float]] = ..., seed: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class StepOutputs(_message.Message):
    __slots__ = ("outputs", "failures", "timelines", "prompt_outputs")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    TIMELINES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    failures: _containers.RepeatedCompositeFieldContainer[RequestFailure]
    timelines: _containers.RepeatedCompositeFieldContainer[RequestTimeline]
    prompt_outputs: _containers.RepeatedCompositeFieldContainer[PromptOutput]
    def __init__(self, outputs: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[RequestFailure, _Mapping]]] = ..., timelines: _Optional[_Iterable[_Union[RequestTimeline, _Mapping]]] = ..., prompt_outputs: _Optional[_Iterable[_Union[PromptOutput, _Mapping]]] = ...) -> None: ...

class PromptOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ...) -> None: ...

class PromptLogprob(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "choice", "index", "token_ids", "logprobs", "finish_reason", "stop_token_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    choice: int
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    finish_reason: str
    stop_token_id: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., finish_reason: _Optional[str] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class RequestFailure(_message.Message):
    __slots__ = ("request_id", "attempt", "kind", "message", "retryable")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    kind: str
    message: str
    retryable: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class RequestTimeline(_message.Message):
    __slots__ = ("request_id", "attempt", "timeline")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TIMELINE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    timeline: _inference_pb2.Timeline
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., timeline: _Optional[_Union[_inference_pb2.Timeline, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeWelcome(_message.Message):
    __slots__ = ("node", "role", "incarnation", "protocol_version", "model_fingerprint", "max_model_len", "ranks", "transport")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    incarnation: str
    protocol_version: int
    model_fingerprint: str
    max_model_len: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    transport: str
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., max_model_len: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., transport: _Optional[str] = ...) -> None: ...

class RankInfo(_message.Message):
    __slots__ = ("rank", "pid", "host")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    rank: int
    pid: int
    host: str
    def __init__(self, rank: _Optional[int] = ..., pid: _Optional[int] = ..., host: _Optional[str] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "role", "ready", "reason", "total_blocks", "free_blocks", "block_size", "running", "waiting", "queued_prefill_tokens", "num_preemptions", "kv_bytes_moved", "draining_blocks", "ranks", "connected_prefill_nodes", "waiting_for_blocks", "costs", "context_tokens", "prefill_chunk", "prefix_cache_queries", "prefix_cache_hits", "troubles")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_PREFILL_NODES_FIELD_NUMBER: _ClassVar[int]
    WAITING_FOR_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERIES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    TROUBLES_FIELD_NUMBER: _ClassVar[int]
    node: str
    role: str
    ready: bool
    reason: str
    total_blocks: int
    free_blocks: int
    block_size: int
    running: int
    waiting: int
    queued_prefill_tokens: int
    num_preemptions: int
    kv_bytes_moved: int
    draining_blocks: int
    ranks: _containers.RepeatedCompositeFieldContainer[RankInfo]
    connected_prefill_nodes: _containers.RepeatedScalarFieldContainer[str]
    waiting_for_blocks: int
    costs: NodeCosts
    context_tokens: int
    prefill_chunk: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    troubles: _containers.RepeatedCompositeFieldContainer[Trouble]
    def __init__(self, node: _Optional[str] = ..., role: _Optional[str] = ..., ready: _Optional[bool] = ..., reason: _Optional[str] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., kv_bytes_moved: _Optional[int] = ..., draining_blocks: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[RankInfo, _Mapping]]] = ..., connected_prefill_nodes: _Optional[_Iterable[str]] = ..., waiting_for_blocks: _Optional[int] = ..., costs: _Optional[_Union[NodeCosts, _Mapping]] = ..., context_tokens: _Optional[int] = ..., prefill_chunk: _Optional[int] = ..., prefix_cache_queries: _Optional[int] = ..., prefix_cache_hits: _Optional[int] = ..., troubles: _Optional[_Iterable[_Union[Trouble, _Mapping]]] = ...) -> None: ...

class Trouble(_message.Message):
    __slots__ = ("node", "stage", "state", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    stage: str
    state: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., stage: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeCosts(_message.Message):
    __slots__ = ("prefill", "decode", "link")
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    prefill: StepCost
    decode: StepCost
    link: LinkCost
    def __init__(self, prefill: _Optional[_Union[StepCost, _Mapping]] = ..., decode: _Optional[_Union[StepCost, _Mapping]] = ..., link: _Optional[_Union[LinkCost, _Mapping]] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("a", "b", "c")
    A_FIELD_NUMBER: _ClassVar[int]
    B_FIELD_NUMBER: _ClassVar[int]
    C_FIELD_NUMBER: _ClassVar[int]
    a: float
    b: float
    c: float
    def __init__(self, a: _Optional[float] = ..., b: _Optional[float] = ..., c: _Optional[float] = ...) -> None: ...

class LinkCost(_message.Message):
    __slots__ = ("latency_s", "s_per_byte", "token_bytes")
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    S_PER_BYTE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    latency_s: float
    s_per_byte: float
    token_bytes: int
    def __init__(self, latency_s: _Optional[float] = ..., s_per_byte: _Optional[float] = ..., token_bytes: _Optional[int] = ...) -> None: ...

class WatchMessage(_message.Message):
    __slots__ = ("welcome", "status")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    welcome: NodeWelcome
    status: NodeStatus
    def __init__(self, welcome: _Optional[_Union[NodeWelcome, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("hello", "prefill", "abort", "heartbeat", "links_welcome")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LINKS_WELCOME_FIELD_NUMBER: _ClassVar[int]
    hello: CompatibilityRecord
    prefill: PrefillTask
    abort: HandoffKey
    heartbeat: Heartbeat
    links_welcome: LinksWelcome
    def __init__(self, hello: _Optional[_Union[CompatibilityRecord, _Mapping]] = ..., prefill: _Optional[_Union[PrefillTask, _Mapping]] = ..., abort: _Optional[_Union[HandoffKey, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., links_welcome: _Optional[_Union[LinksWelcome, _Mapping]] = ...) -> None: ...

class PrefillMessage(_message.Message):
    __slots__ = ("welcome", "links_ready", "outputs", "status")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LINKS_READY_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    welcome: CompatibilityRecord
    links_ready: LinksReady
    outputs: PrefillOutputs
    status: NodeStatus
    def __init__(self, welcome: _Optional[_Union[CompatibilityRecord, _Mapping]] = ..., links_ready: _Optional[_Union[LinksReady, _Mapping]] = ..., outputs: _Optional[_Union[PrefillOutputs, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ...) -> None: ...

class CompatibilityRecord(_message.Message):
    __slots__ = ("protocol_version", "node", "incarnation", "role", "model_fingerprint", "dtype", "kv_dtype", "block_size", "num_layers", "num_kv_heads", "head_size", "tp_size", "transport", "rank_addresses")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_SIZE_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RANK_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    node: str
    incarnation: str
    role: str
    model_fingerprint: str
    dtype: str
    kv_dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    tp_size: int
    transport: str
    rank_addresses: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., node: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_size: _Optional[int] = ..., tp_size: _Optional[int] = ..., transport: _Optional[str] = ..., rank_addresses: _Optional[_Iterable[str]] = ...) -> None: ...

class HandoffKey(_message.Message):
    __slots__ = ("request_id", "attempt", "leg")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    LEG_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    leg: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., leg: _Optional[int] = ...) -> None: ...

class PrefillTask(_message.Message):
    __slots__ = ("handoff", "token_ids", "prompt_len", "choices", "sampling", "start", "cache_salt", "lane", "traceparent", "token_mask")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MASK_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffKey
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_len: int
    choices: _containers.RepeatedScalarFieldContainer[int]
    sampling: NodeSampling
    start: int
    cache_salt: bytes
    lane: int
    traceparent: str
    token_mask: bytes
    def __init__(self, handoff: _Optional[_Union[HandoffKey, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_len: _Optional[int] = ..., choices: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[NodeSampling, _Mapping]] = ..., start: _Optional[int] = ..., cache_salt: _Optional[bytes] = ..., lane: _Optional[int] = ..., traceparent: _Optional[str] = ..., token_mask: _Optional[bytes] = ...) -> None: ...

class PrefillOutputs(_message.Message):
    __slots__ = ("first_tokens", "failures", "prompt_parts")
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_PARTS_FIELD_NUMBER: _ClassVar[int]
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstTokens]
    failures: _containers.RepeatedCompositeFieldContainer[PrefillFailure]
    prompt_parts: _containers.RepeatedCompositeFieldContainer[PromptPart]
    def __init__(self, first_tokens: _Optional[_Iterable[_Union[FirstTokens, _Mapping]]] = ..., failures: _Optional[_Iterable[_Union[PrefillFailure, _Mapping]]] = ..., prompt_parts: _Optional[_Iterable[_Union[PromptPart, _Mapping]]] = ...) -> None: ...

class PromptPart(_message.Message):
    __slots__ = ("handoff", "index", "logprobs")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffKey
    index: int
    logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprob]
    def __init__(self, handoff: _Optional[_Union[HandoffKey, _Mapping]] = ..., index: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[PromptLogprob, _Mapping]]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("handoff", "token_ids", "logprobs", "queue_s", "prefill_s", "cached_tokens")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffKey
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    queue_s: float
    prefill_s: float
    cached_tokens: int
    def __init__(self, handoff: _Optional[_Union[HandoffKey, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., queue_s: _Optional[float] = ..., prefill_s: _Optional[float] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillFailure(_message.Message):
    __slots__ = ("handoff", "kind", "message")
    HANDOFF_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    handoff: HandoffKey
    kind: str
    message: str
    def __init__(self, handoff: _Optional[_Union[HandoffKey, _Mapping]] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LinksWelcome(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LinksReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
