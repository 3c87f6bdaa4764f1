"""How often the tiny model answers right when its turns are sampled at temperature 1.

A plain torch sampler over a batch of episodes: every row advances by one token a step, a prompt or
observation token that it is given or one that it samples. It checks a freshly built model without
an engine; a run's rewards come from the engine and the environment.
"""

from __future__ import annotations

import json
import re
from collections import deque
from random import Random

import torch

from ...rollout.conversation import Conversation
from ...rollout.renderer import Renderer
from .qwen3_torch import Qwen3
from .tokenizer import END_ID, PAD_ID
from .traces import Problem, draw_problem, run_code

_CALL = re.compile(r"<tool_call>(.*)</tool_call>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}$")


class Episode:
    """One problem being solved. `given` holds ids still to be fed, `said` the turn being sampled."""

    def __init__(self, renderer: Renderer, problem: Problem, *, max_calls: int) -> None:
        self.problem, self.calls_left = problem, max_calls
        self.talk = Conversation(renderer, [{"role": "user", "content": problem.question}])
        self.given: deque[int] = deque(self.talk.prompt.tolist())
        self.said: list[int] = []
        self.done, self.reward = False, 0.0

    def next_token(self, sampled: int) -> int:
        """The id at the row's next place: the one it is given, else the one sampled."""
        if self.done:
            return PAD_ID
        if self.given:
            return self.given.popleft()
        self.said.append(sampled)
        if sampled == END_ID:
            self._end_turn()
        return sampled

    def _end_turn(self) -> None:
        text = self.talk.act(self.said)
        self.said = []
        code = called_code(text)
        if code is not None and self.calls_left:
            self.calls_left -= 1
            turn = self.talk.observe([{"role": "tool", "content": run_code(code)}])
            self.given.extend(turn.token_ids.tolist())
            return
        answer = _BOXED.search(text)
        self.done, self.reward = True, float(answer is not None and answer[1] == self.problem.answer)


def called_code(text: str) -> str | None:
    """The program of a turn that is one well-formed call of the Python tool."""
    match = _CALL.fullmatch(text)
    try:
        call = json.loads(match[1]) if match else None
        return str(call["arguments"]["code"]) if call and call["name"] == "python" else None
    except (ValueError, KeyError, TypeError):
        return None


def sampled_reward(
    model: Qwen3,
    renderer: Renderer,
    *,
    episodes: int = 512,
    seed: int = 0,
    max_calls: int = 3,
    max_tokens: int = 160,
) -> float:
    """Mean reward of `episodes` sampled on fresh problems; an episode past `max_tokens` scores 0."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    rows = [Episode(renderer, draw_problem(rng), max_calls=max_calls) for _ in range(episodes)]
    cache = model.new_cache(episodes, max_tokens)
    sampled = [PAD_ID] * episodes
    for position in range(max_tokens):
        tokens = [row.next_token(token) for row, token in zip(rows, sampled, strict=True)]
        if all(row.done for row in rows):
            break
        logits = model.step(torch.tensor(tokens), position, cache)
        sampled = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0].tolist()
    return sum(row.reward for row in rows) / episodes
