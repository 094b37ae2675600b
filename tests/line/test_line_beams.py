"""Beam search over the demo model: what it finds is at least as likely as what greedy finds."""

from __future__ import annotations

from typing import Any

import httpx
import pytest


@pytest.mark.slow
@pytest.mark.long
def test_beams_are_ranked_by_the_models_own_log_probabilities(demo_line: Any) -> None:
    with httpx.Client(base_url=f"{demo_line.record.rest}/v1", timeout=120) as client:
        model = client.get("/models").json()["data"][0]["id"]
        asked = {"model": model, "prompt": "The three largest rivers of", "max_tokens": 8}

        def post(**body: Any) -> list[Any]:
            reply = client.post("/completions", json=asked | body)
            assert reply.status_code == 200, reply.text
            return list(reply.json()["choices"])

        def mean_logprob(choice: Any) -> float:
            ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
            [scored] = post(prompt=ids, echo=True, max_tokens=0, logprobs=0)
            scores = scored["logprobs"]["token_logprobs"][len(choice["prompt_token_ids"]) :]
            return float(sum(scores) / len(scores))

        beams = [
            mean_logprob(choice)
            for choice in post(use_beam_search=True, n=4, return_token_ids=True)
        ]
        [greedy] = post(temperature=0, return_token_ids=True)
        likeliest_step_by_step = mean_logprob(greedy)
    assert beams == sorted(beams, reverse=True)
    assert beams[0] >= likeliest_step_by_step - 1e-4
