"""Short chats with the demo model's answers on a CPU, greedy and at temperature 1."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from headwater.engine_core.executors.build.single import build_executor
from headwater.engine_core.options import ExecutorOptions
from headwater.services.text.model import ServingChoices, load_text_model

from ..speculated_run import run_exchanges
from .replay import Exchange

TEMPERATURES = (0.0, 1.0)
MAX_TOKENS = 160
ROWS = 12
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about rain on a tin roof.",
    "Explain what a hash table is to someone who has never programmed.",
    "Give me five names for a small bakery near the sea.",
    "What is the difference between weather and climate?",
    "Write a Python function that reverses the words of a sentence.",
    "Summarize the plot of Romeo and Juliet in four sentences.",
    "How do I remove a coffee stain from a white shirt?",
    "List the planets of the solar system from the sun outwards.",
    "Write a polite email that moves a meeting from Monday to Wednesday.",
    "What should I pack for a weekend of hiking in autumn?",
    "Explain compound interest with an example.",
    "Translate into French: Where is the nearest train station?",
    "What are three advantages and three disadvantages of working from home?",
    "Tell me a joke about computers.",
    "How does a refrigerator keep food cold?",
    "Write the first paragraph of a detective story set in Lisbon.",
    "What is the capital of Australia, and why is it not Sydney?",
    "Give me a recipe for vegetable soup with the steps numbered.",
    "Who was Ada Lovelace?",
    "Write an SQL query that counts the orders of each customer.",
    "How can I fall asleep more easily?",
    "Describe the water cycle.",
    "Rewrite in plain words: The committee resolved to defer its deliberations until a "
    "subsequent session.",
)


def chats(model_folder: Path) -> Iterator[Exchange]:
    """Answers of a converted model: to each question one answer at each temperature."""
    text = load_text_model(model_folder, "", ServingChoices())
    assert text.chat_template is not None
    asked = []
    for i, question in enumerate(QUESTIONS):
        prompt = text.chat_template.render([{"role": "user", "content": question}])
        prompt_ids = text.tokenizer.encode(prompt, add_special_tokens=False)
        asked.append(Exchange(name=f"chat {i}", prompt_ids=prompt_ids, answer_ids=[0] * MAX_TOKENS))
    options = ExecutorOptions(model_folder=model_folder, max_num_seqs=ROWS)
    executor, config, _ = build_executor(options, lambda phase, done, total: None)
    answer = partial(
        run_exchanges, executor, config, None, asked, rows=ROWS, stop_token_ids=text.eos_token_ids
    )
    answers = [answer(temperature=temperature).token_ids for temperature in TEMPERATURES]
    executor.close()
    for i, each in enumerate(asked):
        for temperature, token_ids in zip(TEMPERATURES, answers, strict=True):
            yield replace(
                each, name=f"{each.name} at temperature {temperature:g}", answer_ids=token_ids[i]
            )
