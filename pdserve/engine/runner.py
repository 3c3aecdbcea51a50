"""One rank at work: batches in, sampled tokens out.

Owns the rank's model, KV cache, sampler and slots. Decides nothing: every rank of the group gets
the same batches and, from the gathered logits and the same noise, samples the same tokens.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.errors import RankError
from pdserve.core.kv_layout import BlockId, KvLayout
from pdserve.core.request import SamplingParams, TokenLogprobs
from pdserve.engine.attention.interface import AttentionMetadata
from pdserve.engine.attention.select import make_backend
from pdserve.engine.batch import Batch, Carried, Chunk, Joined, Sampled, Slot, StepOutput
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.model.decoder import ModelInput
from pdserve.engine.model.load import head_shape, load_model
from pdserve.engine.parallel import TpGroup
from pdserve.engine.sampler import SampledRows, Sampler, SampleRow
from pdserve.engine.slots import Slots

WARM_UP_LEN = 16  # tokens of the prompt that warms a rank up


class PendingStep:
    """A step that was launched; on a GPU it may still be running."""

    def __init__(self, batch: Batch, sampled: SampledRows | None) -> None:
        self._batch = batch
        self._sampled = sampled

    def wait(self) -> StepOutput:
        """The tokens of every sampling chunk, in the chunks' order."""
        if self._sampled is None:
            return StepOutput(step=self._batch.step, sampled=())
        tokens: list[int] = self._sampled.tokens.tolist()  # sync: the front needs them
        outputs = []
        row = 0
        for chunk in self._batch.chunks:
            if chunk.num_samples:
                rows = range(row, row + chunk.num_samples)
                outputs.append(_sampled(self._sampled, tokens, rows))
                row = rows.stop
        return StepOutput(step=self._batch.step, sampled=tuple(outputs))


class ModelRunner:
    """One rank. ``launch`` takes batches in the order of their steps."""

    def __init__(self, config: EngineConfig, group: TpGroup) -> None:
        device = torch.device(config.device)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads)
        self.layout: KvLayout = config.layout
        self.num_blocks = config.num_blocks
        self.config = config
        self._device = device
        kernels = make_kernels(config.kernels, device)
        self._model = load_model(config, group, kernels)
        self.kv = KvCache(self.layout, self.num_blocks, device)
        self._attention = make_backend(
            config.attention_backend, self.kv, head_shape(config), device
        )
        self._sampler = Sampler(
            max_num_seqs=config.max_num_seqs, vocab_size=config.spec.vocab_size, device=device
        )
        self._slots = Slots(
            num_slots=config.max_num_seqs,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_len=config.max_model_len,
            device=device,
        )

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start one step. Raises RankError, nothing changed, where the batch is impossible."""
        self._check(batch)
        for slot in batch.left:
            self._sampler.leave(slot)
        for joined in batch.joined:
            self._sampler.join(joined)
        self._slots.apply(batch)
        self.kv.copy_blocks(batch.copies)
        if not batch.chunks:
            return PendingStep(batch, None)
        hidden = self._model.forward(self._plan(batch.chunks))
        return PendingStep(batch, self._sample(batch.chunks, hidden))

    def warm_up(self) -> None:
        """Run one prompt and one decode step, so that no request pays for what is made on first
        use.

        For a rank that holds no sequence yet: it uses slot 0 and the first blocks.
        """
        length = min(WARM_UP_LEN, self.config.max_model_len - 1)
        slot, num_blocks = Slot(0), self.layout.num_blocks_for(length + 1)
        joined = Joined(
            slot=slot,
            sampling=SamplingParams(max_tokens=2, temperature=0.0),
            choices=(0,),
            end_token_ids=(),
            prompt_len=length,
            history=(),
            blocks=tuple(BlockId(i) for i in range(num_blocks)),
        )
        prompt = Chunk(slot=slot, start=0, tokens=(0,) * length, new_blocks=(), num_samples=1)
        decode = Chunk(slot=slot, start=length, tokens=Carried(), new_blocks=(), num_samples=1)
        self.launch(Batch(step=0, joined=(joined,), chunks=(prompt,))).wait()
        self.launch(Batch(step=1, chunks=(decode,))).wait()
        self.launch(Batch(step=2, left=(slot,))).wait()

    def _check(self, batch: Batch) -> None:
        self._slots.check(batch)
        vocab_size = self.config.spec.vocab_size
        for chunk in batch.chunks:
            tokens = () if isinstance(chunk.tokens, Carried) else chunk.tokens
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
                raise RankError(f"step {batch.step}: a token is not one of {vocab_size}")

    def _plan(self, chunks: Sequence[Chunk]) -> ModelInput:
        """The step's tokens on the device, attention planned for them."""
        positions = self._tensor(
            [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.length)]
        )
        self._attention.plan(
            AttentionMetadata(
                starts=tuple(chunk.start for chunk in chunks),
                lengths=tuple(chunk.length for chunk in chunks),
                positions=positions,
                block_tables=self._slots.tables([chunk.slot for chunk in chunks]),
            )
        )
        return ModelInput(
            token_ids=self._token_ids(chunks), positions=positions, attention=self._attention
        )

    def _token_ids(self, chunks: Sequence[Chunk]) -> Tensor:
        token_ids: list[int] = []
        carried: list[int] = []  # places of carried tokens
        slots: list[Slot] = []
        for chunk in chunks:
            if isinstance(chunk.tokens, Carried):
                carried.append(len(token_ids))
                slots.append(chunk.slot)
                token_ids.append(0)
            else:
                token_ids.extend(chunk.tokens)
        on_device = self._tensor(token_ids)
        if carried:
            on_device[self._tensor(carried)] = self._slots.last_tokens(slots)
        return on_device

    def _sample(self, chunks: Sequence[Chunk], hidden: Tensor) -> SampledRows | None:
        """Sample after each chunk that asks for it; its hidden state is computed to logits once."""
        last_rows: list[int] = []  # of ``hidden``, one for each sampling chunk
        repeats: list[int] = []  # row of the logits, one for each sample
        rows: list[SampleRow] = []
        first_rows: list[int] = []  # of the samples, one for each sampling chunk
        end = 0
        for chunk in chunks:
            end += chunk.length
            if chunk.num_samples:
                first_rows.append(len(rows))
                repeats.extend([len(last_rows)] * chunk.num_samples)
                last_rows.append(end - 1)
                position = chunk.start + chunk.length
                choices = self._slots.choices(chunk.slot)[: chunk.num_samples]
                rows.extend(
                    SampleRow(slot=chunk.slot, choice=choice, position=position)
                    for choice in choices
                )
        if not rows:
            return None
        logits = self._model.logits(hidden[self._tensor(last_rows)])
        if len(rows) > len(last_rows):
            logits = logits[self._tensor(repeats)]
        sampled = self._sampler.sample(logits, rows)
        tokens = sampled.tokens
        if len(rows) > len(last_rows):
            tokens = tokens[self._tensor(first_rows)]
        self._slots.keep_last_tokens([c.slot for c in chunks if c.num_samples], tokens)
        return sampled

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _sampled(sampled: SampledRows, tokens: Sequence[int], rows: range) -> Sampled:
    logprobs: list[TokenLogprobs] = []
    for row in rows:
        if (entry := sampled.logprobs(row)) is not None:
            logprobs.append(entry)
    return Sampled(tokens=tuple(tokens[rows.start : rows.stop]), logprobs=tuple(logprobs))
