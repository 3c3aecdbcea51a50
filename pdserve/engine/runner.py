"""One rank at work: batches in, sampled tokens out.

Owns the rank's model, KV cache, sampler and slots. Decides nothing: every rank of the group gets
the same batches and, from the gathered logits and the same noise, samples the same tokens.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.core.errors import RankError
from pdserve.core.kv_layout import KvLayout
from pdserve.core.request import TokenLogprobs
from pdserve.engine.attention.interface import AttentionMetadata, CapturableBackend
from pdserve.engine.attention.select import make_backend
from pdserve.engine.batch import Batch, Carried, Chunk, Sampled, Slot, StepOutput
from pdserve.engine.decode_graphs import DecodeGraphs
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.memory import num_blocks_that_fit, peak_bytes
from pdserve.engine.model.decoder import ModelInput
from pdserve.engine.model.load import head_shape, load_model
from pdserve.engine.parallel import TpGroup
from pdserve.engine.rehearsal import Rehearsal, largest_steps, warm_up
from pdserve.engine.sampler import SampledRows, Sampler, SampleRow
from pdserve.engine.slots import Slots
from pdserve.engine.staging import HostCopy, on_device


class PendingStep:
    """A step that was launched; on a GPU it may still be running, and later ones behind it."""

    def __init__(self, batch: Batch, sampled: SampledRows | None, device: torch.device) -> None:
        self._batch = batch
        self._sampled = sampled
        self._tokens = HostCopy(device, *(() if sampled is None else (sampled.tokens,)))

    def wait(self) -> StepOutput:
        """The tokens of every sampling chunk, in the chunks' order, once the step is done."""
        copied = self._tokens.wait()
        if self._sampled is None:
            return StepOutput(step=self._batch.step, sampled=())
        tokens: list[int] = copied[0].tolist()
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
        else:
            torch.cuda.set_device(device)  # of this thread, which launches all steps
        self.layout: KvLayout = config.layout
        self.config = config
        self._device = device
        kernels = make_kernels(config.kernels, device)
        self._model = load_model(config, group, kernels)
        self._sampler = Sampler(
            max_num_seqs=config.max_num_seqs, vocab_size=config.spec.vocab_size, device=device
        )
        self._graphs: DecodeGraphs | None = None
        if config.gpu_memory_utilization is None:
            self._open_cache(config.num_blocks)
        else:
            self._fill_memory(config.gpu_memory_utilization, group)
        if config.cuda_graphs:
            self._graphs = self._make_graphs()

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
            return PendingStep(batch, None, self._device)
        hidden = self._forward(batch.chunks)
        return PendingStep(batch, self._sample(batch, hidden), self._device)

    def warm_up(self) -> None:
        """Run one prompt and one decode step, and capture decode graphs, so that no request pays
        for what is made on first use.

        For a rank that holds no sequence yet: it uses slot 0 and the first blocks.
        """
        if self._graphs is not None:
            self._graphs.capture()
        self._rehearse(warm_up(self.config))

    def _open_cache(self, num_blocks: int) -> None:
        """The cache and what points into it."""
        config = self.config
        self.num_blocks = num_blocks
        self.kv = KvCache(self.layout, num_blocks, self._device)
        self._attention = make_backend(
            config.attention_backend, self.kv, head_shape(config), self._device
        )
        self._slots = Slots(
            num_slots=config.max_num_seqs,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_len=config.max_model_len,
            device=self._device,
        )

    def _fill_memory(self, utilization: float, group: TpGroup) -> None:
        """Open the largest cache beside which the largest steps still run."""
        rehearsal = largest_steps(self.config)
        self._open_cache(rehearsal.num_blocks)
        step_bytes = peak_bytes(self._device, lambda: self._rehearse(rehearsal))
        self._open_cache(1)  # lets the other go
        self._open_cache(num_blocks_that_fit(self.config, utilization, step_bytes, group))

    def _make_graphs(self) -> DecodeGraphs | None:
        """Graphs of decode steps; None where there can be none."""
        config, attention = self.config, self._attention
        if self._device.type != "cuda" or config.tp_size > 1:
            return None
        if not isinstance(attention, CapturableBackend):
            return None

        def forward(token_ids: Tensor, positions: Tensor, block_tables: Tensor) -> Tensor:
            attention.plan_decodes(positions, block_tables)
            return self._model.forward(
                ModelInput(
                    token_ids=token_ids,
                    positions=positions,
                    attention=self._attention,
                    last_rows=None,
                )
            )

        return DecodeGraphs(
            forward,
            max_num_seqs=config.max_num_seqs,
            max_num_blocks=self.layout.num_blocks_for(config.max_model_len),
            device=self._device,
        )

    def _rehearse(self, rehearsal: Rehearsal) -> None:
        for batch in rehearsal.batches:
            self.launch(batch).wait()

    def _check(self, batch: Batch) -> None:
        self._slots.check(batch)
        vocab_size = self.config.spec.vocab_size
        for chunk in batch.chunks:
            tokens = () if isinstance(chunk.tokens, Carried) else chunk.tokens
            if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
                raise RankError(f"step {batch.step}: a token is not one of {vocab_size}")
        for mask in batch.masks:
            if len(mask.bits) != -(-vocab_size // 8):
                raise RankError(
                    f"step {batch.step}: a mask of {len(mask.bits)} bytes for {vocab_size} tokens"
                )

    def _forward(self, chunks: Sequence[Chunk]) -> Tensor:
        """Hidden states ``[R, hidden]`` of the last token of each sampling chunk."""
        positions = self._tensor(
            [p for chunk in chunks for p in range(chunk.start, chunk.start + chunk.length)]
        )
        token_ids = self._token_ids(chunks)
        last_rows = self._last_rows(chunks)
        block_tables = self._slots.tables([chunk.slot for chunk in chunks])
        is_decode = all(chunk.length == 1 for chunk in chunks)
        if is_decode and self._graphs is not None and len(chunks) in self._graphs:
            hidden = self._graphs.run(token_ids, positions, block_tables)
            return hidden if last_rows is None else hidden[last_rows]
        self._attention.plan(
            AttentionMetadata(
                starts=tuple(chunk.start for chunk in chunks),
                lengths=tuple(chunk.length for chunk in chunks),
                positions=positions,
                block_tables=block_tables,
            )
        )
        return self._model.forward(
            ModelInput(
                token_ids=token_ids,
                positions=positions,
                attention=self._attention,
                last_rows=last_rows,
            )
        )

    def _last_rows(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """``[R]``: of the step's tokens those that are sampled after; None for all of them."""
        ends = itertools.accumulate(chunk.length for chunk in chunks)
        rows = [end - 1 for end, chunk in zip(ends, chunks, strict=True) if chunk.num_samples]
        num_tokens = sum(chunk.length for chunk in chunks)
        return None if len(rows) == num_tokens else self._tensor(rows)

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
        held = self._tensor(token_ids)
        if carried:
            held[self._tensor(carried)] = self._slots.last_tokens(slots)
        return held

    def _sample(self, batch: Batch, hidden: Tensor) -> SampledRows | None:
        """Sample after each chunk that asks for it, from its row of ``hidden``; the logits of a
        row are computed once, however many samples are drawn from them.
        """
        sampling = [chunk for chunk in batch.chunks if chunk.num_samples]
        if not sampling:
            return None
        repeats: list[int] = []  # row of the logits, one for each sample
        rows: list[SampleRow] = []
        first_rows: list[int] = []  # of the samples, one for each sampling chunk
        for row, chunk in enumerate(sampling):
            first_rows.append(len(rows))
            repeats.extend([row] * chunk.num_samples)
            position = chunk.start + chunk.length
            choices = self._slots.choices(chunk.slot)[: chunk.num_samples]
            rows.extend(
                SampleRow(slot=chunk.slot, choice=choice, position=position) for choice in choices
            )
        logits = self._model.logits(hidden)
        if len(rows) > len(sampling):
            logits = logits[self._tensor(repeats)]
        masks = {mask.slot: mask.bits for mask in batch.masks}
        sampled = self._sampler.sample(logits, rows, masks)
        tokens = sampled.tokens
        if len(rows) > len(sampling):
            tokens = tokens[self._tensor(first_rows)]
        self._slots.keep_last_tokens([chunk.slot for chunk in sampling], tokens)
        return sampled

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return on_device(values, torch.int64, self._device)


def _sampled(sampled: SampledRows, tokens: Sequence[int], rows: range) -> Sampled:
    logprobs: list[TokenLogprobs] = []
    for row in rows:
        if (entry := sampled.logprobs(row)) is not None:
            logprobs.append(entry)
    return Sampled(tokens=tuple(tokens[rows.start : rows.stop]), logprobs=tuple(logprobs))
