"""What lm-eval measures of a server: python lm_eval_client.py URL MODEL TASKS ids|strings prints
one JSON object."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

url, model, tasks, sends = sys.argv[1:]
result: Any = simple_evaluate(
    model="local-completions",
    # The tokenizer is found to be the server's, by /tokenizer_info.
    model_args={
        "model": model,
        "base_url": f"{url}/completions",
        "tokenized_requests": sends == "ids",
        "num_concurrent": 2,
        "max_retries": 1,
    },
    tasks=["choice", "rolling", "written"],
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    log_samples=True,
    bootstrap_iters=0,
)
print(
    json.dumps(
        {
            "version": importlib.metadata.version("lm_eval"),
            "scores": result["results"],
            "samples": {
                name: [
                    sample["filtered_resps"]
                    for sample in sorted(samples, key=lambda each: each["doc_id"])
                ]
                for name, samples in result["samples"].items()
            },
        },
        default=str,
    )
)
