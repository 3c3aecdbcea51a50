"""Hugging Face ``generate``, timed token by token: what ``pdserve bench engine`` compares with."""

import importlib
import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


class Transformers:
    """A model of transformers. The library is loaded here only, when it is asked for."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: str) -> None:
        self._library: Any = importlib.import_module("transformers")
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
        self._device = device
        self._model = self._library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model.to(device).eval()

    def seconds(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[float]:
        """Continue each prompt by ``num_tokens``: seconds of the first step, then of the others."""
        token_ids = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        settings = self._library.GenerationConfig(
            do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        )
        times = [time.perf_counter()]

        def after_token(tokens: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
            tokens[:, -1].tolist()  # sync: the step has ended when its tokens are here
            times.append(time.perf_counter())
            return torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)

        self._model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            generation_config=settings,
            stopping_criteria=self._library.StoppingCriteriaList([after_token]),
        )
        return [end - start for start, end in itertools.pairwise(times)]
