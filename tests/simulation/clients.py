"""The clients of a simulation: what they ask, what is right, what they got."""

import asyncio
from dataclasses import dataclass, field

from pdserve.core.errors import PdserveError
from pdserve.core.request import FinishReason, SamplingParams, TokenOutput
from pdserve.text.tokenizer import Tokenizer
from router.choice_text import ChoiceText, Delta, TextRules
from router.generation import GenerationRequest, generate
from router.legs import Job
from router.service import Service
from tests.nodes.specs import MODEL
from tests.oracle import FakeModel
from tests.prompts import VOCAB_SIZE, make_prompt
from tests.simulation.schedule import Cluster, Wish

ENDS = tuple(range(0, VOCAB_SIZE, 9))


@dataclass(eq=False)
class Answer:
    """One choice of one prompt: the right tokens, text and end, and what came of them."""

    tokens: tuple[int, ...]
    text: str
    reason: FinishReason
    got_tokens: tuple[int, ...] = ()
    got_text: str = ""
    got_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        assert self.got_reason is None, "something came after the end"
        self.got_tokens += delta.token_ids
        self.got_text += delta.text
        self.got_reason = delta.finish_reason
        assert self.got_tokens == self.tokens[: len(self.got_tokens)], "a wrong token"
        assert self.text.startswith(self.got_text), "wrong text"
        if self.got_reason is not None:
            assert self.got_tokens == self.tokens, "tokens are missing"
            assert self.got_text == self.text, "text is missing"
            assert self.got_reason is self.reason, "another end"


@dataclass(eq=False)
class Client:
    """One call, from its coming to its end."""

    number: int
    wish: Wish
    requests: list[GenerationRequest]
    answers: dict[tuple[int, int], Answer]  # by prompt and choice
    is_over: bool = False
    has_left: bool = False
    error: str | None = None  # its kind, or that the router was lost
    timelines: list[object] = field(default_factory=list)

    async def ask(self, service: Service, now_s: float) -> None:
        """What the router does for this call; runs in its process."""
        jobs = self.requests
        tenant = f"tenant {self.wish.tenant}"
        try:
            with generate(
                service.dispatcher,
                service.tokenizer,
                jobs,
                label=str(self.number),
                tenant=tenant,
                arrived_s=now_s,
            ) as generation:
                async for deltas in generation:
                    for delta in deltas:
                        if not self.has_left:
                            self.answers[delta.prompt, delta.choice].add(delta)
            if not self.has_left:
                assert all(a.got_reason is not None for a in self.answers.values())
        except PdserveError as error:
            self.error = error.kind

    def end(self, asking: "asyncio.Task[None]") -> None:
        """The router is done with it, or has never begun."""
        self.is_over = True
        if not asking.cancelled():
            asking.result()

    def lose(self) -> None:
        """The router is gone."""
        if not self.is_over:
            self.error = "connection lost"
            self.is_over = True


def make_client(
    model: FakeModel, tokenizer: Tokenizer, cluster: Cluster, wish: Wish, number: int
) -> Client:
    """The wish as this cluster can serve it, with the right answers."""
    longest = min(cluster.decode_blocks * cluster.decode_block_size, MODEL.max_position)
    most_choices = min(cluster.max_num_seqs, cluster.max_num_batched_tokens)
    num_choices = min(wish.num_choices, most_choices)
    prompt_len = min(wish.prompt_len, longest - 1)
    max_tokens = min(wish.max_tokens, longest - prompt_len)
    requests, answers = [], {}
    for i in range(wish.num_prompts):
        seed = 100 * number + i
        sampling = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(wish.min_tokens, max_tokens),
            seed=seed,
            stop_token_ids=ENDS if wish.ends else (),
        )
        job = Job(
            prompt_ids=tuple(make_prompt(seed, prompt_len, num_alike=wish.num_alike)),
            sampling=sampling,
            num_choices=num_choices,
            cache_salt=wish.salt,
            priority=wish.priority,
        )
        rules = TextRules(
            stop=() if wish.stop is None else (wish.stop,),
            min_tokens=sampling.min_tokens,
            stop_token_ids=frozenset(sampling.stop_token_ids),
        )
        request = GenerationRequest(job=job, rules=rules)
        requests.append(request)
        for choice in range(num_choices):
            answers[i, choice] = _right(model, tokenizer, request, choice)
    return Client(number=number, wish=wish, requests=requests, answers=answers)


def _right(
    model: FakeModel, tokenizer: Tokenizer, request: GenerationRequest, choice: int
) -> Answer:
    """What comes where nothing goes wrong, a token at a time."""
    job = request.job
    ends = (*MODEL.eos_token_ids, *job.sampling.stop_token_ids)
    prompt_len = len(job.prompt_ids)
    tokens = model.answer(
        job.prompt_ids,
        job.sampling,
        choice,
        prompt_len=prompt_len,
        end_token_ids=ends,
        max_len=prompt_len + job.sampling.max_tokens,
    )
    text, said = ChoiceText(tokenizer, request.rules, job.prompt_ids), ""
    for i, token in enumerate(tokens):
        reason = None
        if i == len(tokens) - 1:
            reason = FinishReason.STOP if token in ends else FinishReason.LENGTH
        piece = text.push(
            TokenOutput(
                request_id="",
                attempt=0,
                choice=choice,
                index=i,
                token_ids=(token,),
                finish_reason=reason,
                stop_token_id=token if token in ends else None,
            )
        )
        said += piece.text
        if piece.finish_reason is not None:
            return Answer(tuple(tokens[: i + 1]), said, piece.finish_reason)
    raise AssertionError("an answer has an end")
