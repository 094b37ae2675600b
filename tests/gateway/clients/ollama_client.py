"""What Ollama's client for Python sees of a gateway: python ollama_client.py URL MODEL prints one
JSON object."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

import ollama

url, model = sys.argv[1:]
client = ollama.Client(host=url)
greedy = {"temperature": 0, "num_predict": 12}
question = [{"role": "user", "content": "What is the weather in Ulm?"}]
schema = {"type": "object", "properties": {"river": {"enum": ["Blau"]}}, "required": ["river"]}


def weather(city: str) -> str:
    """The weather.

    Args:
      city: where
    """
    return f"Rain in {city}."


quiet = {"model": model, "think": False, "options": greedy}
whole = client.chat(**quiet, messages=question)
parts = list(client.chat(**quiet, messages=question, stream=True))
formed = client.chat(
    model=model, think=False, messages=question, format=schema, options={"temperature": 0}
)
call = {"function": {"name": "weather", "arguments": {"city": "Ulm"}}}
history = [
    *question,
    {"role": "assistant", "content": "", "tool_calls": [call]},
    {"role": "tool", "content": "Rain.", "tool_name": "weather"},
]
after = client.chat(**quiet, messages=history, tools=[weather])
generated = client.generate(model=model, prompt="Once upon a time", raw=True, options=greedy)
pieces = [
    part.response
    for part in client.generate(
        model=model, prompt="Once upon a time", raw=True, options=greedy, stream=True
    )
]
vectors = client.embed(model=model, input=["A river.", "A lake."])
old = client.embeddings(model=model, prompt="A river.")
refusals = {}
wrongs = {
    "model": lambda: client.chat(model="none", messages=question),
    "temperature": lambda: client.chat(model, question, options={"temperature": 7}),
    "pull": lambda: client.pull("llama3"),
}
for name, wrong in wrongs.items():
    try:
        wrong()
    except ollama.ResponseError as error:
        refusals[name] = {"status": error.status_code, "sentence": error.error}

print(
    json.dumps(
        {
            "version": version("ollama"),
            "whole": whole.message.content,
            "streamed": "".join(part.message.content for part in parts),
            "reason": whole.done_reason,
            "counts": [whole.prompt_eval_count, whole.eval_count, parts[-1].eval_count],
            "has_durations": bool(whole.total_duration and whole.eval_duration),
            "river": json.loads(formed.message.content)["river"],
            "after": after.done,
            "generated": generated.response,
            "pieces": "".join(pieces),
            "lengths": [len(vector) for vector in vectors.embeddings],
            "old": len(old.embedding),
            "listed": [each.model for each in client.list().models],
            "running": [each.model for each in client.ps().models],
            "capabilities": client.show(model).capabilities,
            "refusals": refusals,
        }
    )
)
