"""One rank at work: batches in, sampled tokens out.

Owns the rank's model, KV cache, sampler and slots. Decides nothing: every rank of the group gets
the same batches and, from the gathered logits and the same noise, samples the same tokens.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from pdserve.core.errors import ConfigError, RankError
from pdserve.core.kv_layout import KvLayout
from pdserve.engine.attention.interface import (
    AttentionMetadata,
    CapturableBackend,
    CapturableChunks,
)
from pdserve.engine.attention.select import make_backend
from pdserve.engine.batch import Batch, Carried, Chunk
from pdserve.engine.engine_config import EngineConfig
from pdserve.engine.kernels.select import make_kernels
from pdserve.engine.kv_cache import KvCache
from pdserve.engine.memory import num_blocks_that_fit, peak_bytes
from pdserve.engine.model.decoder import ModelInput
from pdserve.engine.model.load import head_shape, load_model
from pdserve.engine.parallel import TpGroup
from pdserve.engine.pending_step import PendingStep
from pdserve.engine.prompt_scores import PromptScorer
from pdserve.engine.rehearsal import largest_steps, warm_up
from pdserve.engine.sampler import SampledRows, Sampler, SampleRow
from pdserve.engine.slots import Slots
from pdserve.engine.staging import integers_on_host, mark, on_device
from pdserve.engine.step_graphs import StepGraphs, chunk_shapes, decode_shapes
from pdserve.engine.step_input import NewBlocks, StepInput, StepShape, pack, shape_of


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
        self._scorer = PromptScorer(self._model.logits, device)
        self._graphs: StepGraphs | None = None
        if config.gpu_memory_utilization is None:
            self._open_cache(config.num_blocks)
        else:
            self._fill_memory(config.gpu_memory_utilization, group)
        if config.cuda_graphs:
            self._graphs = self._make_graphs(group)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start one step. Raises RankError, nothing changed, where the batch is impossible."""
        self._check(batch)
        began = mark(self._device)
        for slot in batch.left:
            self._sampler.leave(slot)
            self._scorer.leave(slot)
        for joined in batch.joined:
            self._sampler.join(joined)
            self._scorer.join(joined)
        self._sampler.prepare_picks()
        new = self._slots.apply(batch)
        self.kv.copy_blocks(batch.copies)
        sampled = self._run(batch, new)
        return PendingStep(batch, sampled, self._device, self._scorer.take(), began)

    def warm_up(self) -> None:
        """Capture graphs, and run one prompt and one decode step, so that no request pays for what
        is made on first use.

        For a rank that holds no sequence yet: it uses slot 0 and the first blocks.
        """
        if self._graphs is not None:
            self._graphs.capture(partial(self._values, (), NewBlocks(places=[], blocks=[])))
        self._rehearse(warm_up(self.config, self.num_blocks))

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
            spare_block=self.kv.spare_block,
            block_size=config.block_size,
            max_len=config.max_model_len,
            device=self._device,
        )

    def _fill_memory(self, utilization: float, group: TpGroup) -> None:
        """Open the largest cache beside which the largest steps still run."""
        most_blocks = num_blocks_that_fit(self.config, utilization, 0, group)
        rehearsal = largest_steps(self.config, most_blocks)
        self._open_cache(rehearsal.num_blocks)
        try:
            step_bytes = peak_bytes(self._device, lambda: self._rehearse(rehearsal.batches))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"max_num_batched_tokens: the memory does not hold a step of "
                f"{self.config.max_num_batched_tokens} tokens at the end of a sequence of "
                f"{self.config.max_model_len}; lower it or model.max_model_len: {error}"
            ) from error
        self._open_cache(1)  # lets the other go
        self._open_cache(num_blocks_that_fit(self.config, utilization, step_bytes, group))

    def _make_graphs(self, group: TpGroup) -> StepGraphs | None:
        """Graphs of small steps; None where there can be none."""
        config, attention = self.config, self._attention
        if self._device.type != "cuda" or not group.runs_in_graphs:
            return None
        if not isinstance(attention, CapturableBackend):
            return None
        shapes = decode_shapes(config.max_num_seqs)
        if isinstance(attention, CapturableChunks) and attention.captures_chunks:
            most_tokens = min(config.max_num_batched_tokens, config.max_model_len)
            weights = config.spec.layer_weights / group.size
            shapes += chunk_shapes(config.max_num_seqs, most_tokens, weights)
        return StepGraphs(
            self._filled_up,
            self._end,
            shapes,
            vocab_size=config.spec.vocab_size,
            dtype=config.torch_dtype,
            device=self._device,
        )

    def _filled_up(self, step: StepInput, shape: StepShape) -> Tensor:
        """Logits ``[S, V]`` after each chunk, from tensors alone: what a graph holds."""
        attention = self._attention
        self._slots.write(step.places, step.blocks)
        tables = self._slots.tables(step.slots)
        if shape.has_single_tokens:
            assert isinstance(attention, CapturableBackend)
            positions, last_rows = step.starts, None
            attention.plan_decodes(positions, tables)
        else:
            assert isinstance(attention, CapturableChunks)
            owners = step.owners()
            positions, last_rows = step.positions(owners), step.ends - 1
            context_lens = step.starts + step.lengths()
            attention.plan_chunks(step.ends, context_lens, owners, positions, tables)
        return self._model.logits(self._hidden(step, positions, last_rows))

    def _end(
        self, step: StepInput, shape: StepShape, logits: Tensor, tokens: Tensor, kept: Tensor
    ) -> None:
        """A step in a graph samples, as far as that needs tensors alone."""
        lengths = 1 if shape.has_single_tokens else step.lengths()
        self._sampler.pick(logits, step.slots, step.starts + lengths, tokens, kept)
        self._slots.keep_last_tokens(step.keep_in, tokens)

    def _rehearse(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
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

    def _run(self, batch: Batch, new: NewBlocks) -> SampledRows | None:
        """Forward and sample; None where no chunk asks for it."""
        chunks = batch.chunks
        if not chunks:
            self._slots.write_now(new)
            return None
        step = shape_of(chunks, new)
        graphs = None if self._scorer.wants_any(chunks) else self._graphs
        shape = graphs.shape_for(step) if graphs is not None else None
        if graphs is None or shape is None:
            logits = self._forward(chunks, new, step)
            return None if logits is None else self._sample(batch, logits)
        if len(new.places) > shape.num_new_blocks:
            self._slots.write_now(new)
            new = NewBlocks(places=[], blocks=[])
        logits, tokens = graphs.run(self._values(chunks, new, shape), shape)
        rows = [row for row, chunk in enumerate(chunks) if chunk.num_samples]
        if not rows:
            return None
        if self._picks(batch):
            return SampledRows(self._rows_of(tokens, rows))
        return self._sample(batch, self._rows_of(logits, rows))

    def _forward(self, chunks: Sequence[Chunk], new: NewBlocks, shape: StepShape) -> Tensor | None:
        """Logits ``[R, V]`` after each sampling chunk; None where there is none."""
        values = integers_on_host(self._values(chunks, new, shape), self._device)
        step = StepInput.named(values.to(self._device, non_blocking=True), shape)
        self._slots.write(step.places, step.blocks)
        positions = step.positions(step.owners())
        num_held = self._slots.num_held([chunk.slot for chunk in chunks])
        self._attention.plan(
            AttentionMetadata(
                starts=tuple(chunk.start for chunk in chunks),
                lengths=tuple(chunk.length for chunk in chunks),
                positions=positions,
                block_tables=self._slots.tables(step.slots, num_held),
            )
        )
        rows = [row for row, chunk in enumerate(chunks) if chunk.num_samples]
        last_rows = None if len(rows) == shape.num_tokens else self._rows_of(step.ends - 1, rows)
        if self._scorer.wants_any(chunks):
            hidden = self._hidden(step, positions, None)
            self._scorer.score(chunks, hidden)
            hidden = hidden if last_rows is None else hidden[last_rows]
        else:
            hidden = self._hidden(step, positions, last_rows)
        return self._model.logits(hidden) if rows else None

    def _hidden(self, step: StepInput, positions: Tensor, last_rows: Tensor | None) -> Tensor:
        """Hidden states ``[R, hidden]``; attention is planned."""
        return self._model.forward(
            ModelInput(
                token_ids=self._slots.token_ids(step.tokens),
                positions=positions,
                attention=self._attention,
                last_rows=last_rows,
            )
        )

    def _values(self, chunks: Sequence[Chunk], new: NewBlocks, shape: StepShape) -> list[int]:
        slots = self._slots
        return pack(chunks, new, shape, spare=slots.spare, spare_entry=slots.spare_entry)

    def _rows_of(self, tensor: Tensor, rows: Sequence[int]) -> Tensor:
        """These ascending rows."""
        if not rows or rows[-1] == len(rows) - 1:
            return tensor[: len(rows)]
        return tensor[on_device(rows, torch.int64, self._device)]

    def _picks(self, batch: Batch) -> bool:
        """True if the sampler picks the step's tokens."""
        sampling = [chunk for chunk in batch.chunks if chunk.num_samples]
        return (
            not batch.masks
            and all(chunk.num_samples == 1 for chunk in sampling)
            and self._sampler.picks([chunk.slot for chunk in sampling])
        )

    def _sample(self, batch: Batch, logits: Tensor) -> SampledRows:
        """Sample after each chunk that asks for it, from its row of ``logits``, however many
        samples are drawn from it.
        """
        sampling = [chunk for chunk in batch.chunks if chunk.num_samples]
        slots = [chunk.slot for chunk in sampling]
        if self._picks(batch):
            positions = [chunk.start + chunk.length for chunk in sampling]
            slots_there, positions_there = self._tensor([*slots, *positions]).view(2, -1)
            tokens = torch.empty_like(slots_there)
            self._sampler.pick(logits, slots_there, positions_there, tokens)
            self._slots.keep_last_tokens(slots_there, tokens)
            return SampledRows(tokens)
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
        masks = {mask.slot: mask.bits for mask in batch.masks}
        if len(rows) > len(sampling):
            sampled = self._sampler.sample_repeated(logits, repeats, rows, masks)
        else:
            sampled = self._sampler.sample(logits, rows, masks)
        tokens = self._rows_of(sampled.tokens, first_rows)
        self._slots.keep_last_tokens(self._tensor(slots), tokens)
        return sampled

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return on_device(values, torch.int64, self._device)
