"""What routers and prefill nodes send, checked and in the engine's words."""

from decode_node.grammars import Ends, Grammars
from pdserve.core.errors import InvalidRequestError, NeverFitsError, PrefillFailedError
from pdserve.core.model_spec import ModelSpec
from pdserve.core.request import Request
from pdserve.engine.batch import Sampled, Scored
from pdserve.engine.constraint import Constraint
from pdserve.engine.sequence import Sequence
from pdserve.rank.intake import check_work, end_token_ids
from pdserve.rpc import convert
from pdserve.rpc.v1 import session_pb2
from pdserve.text.grammar import allows


def make_sequence(
    request: Request,
    model: ModelSpec,
    *,
    max_model_len: int,
    max_choices: int,
    arrived_s: float,
    grammars: Grammars | None,
) -> Sequence:
    """The first life of a request. Raises InvalidRequestError if no life of it could run here."""
    sampling = request.sampling
    check_work(
        model,
        token_ids=request.token_ids,
        prompt_len=request.prompt_len,
        choices=request.choices,
        sampling=sampling,
    )
    num_tokens, num_choices = len(request.token_ids), len(request.choices)
    wanted_len = request.prompt_len + sampling.max_tokens
    if num_tokens >= wanted_len:
        raise InvalidRequestError("token_ids", "all tokens that were asked for are there")
    if num_tokens >= max_model_len:
        raise NeverFitsError(
            "prompt", f"{num_tokens} tokens; this node takes up to {max_model_len - 1}"
        )
    if num_choices > max_choices:
        raise NeverFitsError("n", f"{num_choices} choices; this node takes up to {max_choices}")
    ends = end_token_ids(model, sampling)
    return Sequence(
        key=request.key,
        choices=request.choices,
        sampling=sampling,
        prompt_len=request.prompt_len,
        token_ids=list(request.token_ids),
        end_token_ids=ends,
        constraint=_constraint(request, ends, grammars),
        max_len=min(wanted_len, max_model_len),
        arrived_s=arrived_s,
        cache_salt=request.cache_salt,
        is_cacheable=sampling.prompt_logprobs is None,  # every row of the prompt is looked at
        lane=request.route.lane,
    )


def _constraint(
    request: Request, end_ids: tuple[int, ...], grammars: Grammars | None
) -> Constraint | None:
    if request.grammar is None:
        return None
    if grammars is None:
        raise InvalidRequestError(request.grammar.field, "this node follows no grammars")
    output_ids = request.token_ids[request.prompt_len :]
    ends = Ends(token_ids=end_ids, min_tokens=request.sampling.min_tokens)
    return grammars.begin(request.key, request.grammar, output_ids, ends)


def read_prompt_part(message: session_pb2.PromptPart, sequence: Sequence) -> Scored:
    """Log-probabilities of prompt tokens. Raises PrefillFailedError if nobody asked for these."""
    wanted = sequence.sampling.prompt_logprobs is not None
    stop = message.index + len(message.logprobs)
    are_paired = all(len(item.top_ids) == len(item.top_logprobs) for item in message.logprobs)
    if not wanted or not 1 <= message.index <= stop <= sequence.prompt_len or not are_paired:
        raise PrefillFailedError(
            f"log-probabilities of prompt tokens {message.index} to {stop - 1} came, which nobody "
            "asked for"
        )
    logprobs = tuple(map(convert.prompt_logprob_from_proto, message.logprobs))
    return Scored(chunk=0, start=message.index, logprobs=logprobs)


def read_first_tokens(message: session_pb2.FirstTokens, sequence: Sequence) -> Sampled:
    """The first tokens of a prefill, with log-probabilities if the sequence wants them.

    Raises PrefillFailedError if they are not what was asked for.
    """
    num_choices = len(sequence.choices)
    num_wanted = 0 if sequence.sampling.logprobs is None else num_choices
    num_tokens, num_logprobs = len(message.token_ids), len(message.logprobs)
    are_paired = all(len(item.top_ids) == len(item.top_logprobs) for item in message.logprobs)
    if num_tokens != num_choices or num_logprobs != num_wanted or not are_paired:
        raise PrefillFailedError(
            f"{num_tokens} first tokens with {num_logprobs} log-probabilities came, wanted were "
            f"{num_choices} with {num_wanted}"
        )
    mask = sequence.token_mask
    if mask is not None and not all(allows(mask, token_id) for token_id in message.token_ids):
        raise PrefillFailedError("a first token came that the grammar does not allow")
    logprobs = tuple(convert.logprobs_from_proto(item) for item in message.logprobs)
    return Sampled(tokens=tuple(message.token_ids), logprobs=logprobs)
