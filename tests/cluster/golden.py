"""Greedy answers of an independent implementation, and how ours are compared with them."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.cluster.served import Served

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text()
)
SHORT_CASES = [CASES[i] for i in (0, 4, 6, 22)]  # 8 to 26 output tokens
NEAR_TIE = 0.002  # of the reference's best two logits: from there on both are right


def body_of(case: dict[str, Any]) -> dict[str, Any]:
    """The request to /v1/completions whose answer is the case's."""
    return {
        "prompt": case["prompt_token_ids"],
        "max_tokens": case["max_tokens"],
        "temperature": 0,
        "return_token_ids": True,
        "timeline": True,
    }


def first_difference(case: dict[str, Any], got: list[int]) -> str | None:
    """Where ``got`` leaves the reference, if it does so before a near tie."""
    want = case["output_token_ids"]
    for i, (token, margin) in enumerate(zip(want, case["margins"], strict=True)):
        if i < len(got) and got[i] == token:
            continue
        if margin < NEAR_TIE:
            return None
        return f"token {i}: want {token}, got {got[i] if i < len(got) else 'nothing'}"
    return None if len(got) == len(want) else f"{len(got) - len(want)} tokens too many"


def ask_all(cluster: Served, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask all at once; the answers, each of which was right."""
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: cluster.post("/v1/completions", body_of(case)), cases))
    for case, answer in zip(cases, answers, strict=True):
        problem = first_difference(case, answer["choices"][0]["token_ids"])
        assert problem is None, f"{case['prompt']!r}: {problem}"
    return answers
