"""What the policy is shown of an episode: all of it, or its words and its newest images."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rz_agent.envs import AppendOnly, Observation, SlidingImages, pictured
from rz_agent.envs.message import IMAGE, Message, TextPart, count_images, joined, observation, text_of
from rz_agent.rollout.renderer import Renderer
from test_episode import Scripted, Talk, play
from test_renderer import QWEN3, say, write_model

# As a vision model's template does it: an image is a special token. This tokenizer has one to spare.
VISION = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<|endoftext|>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
IMAGE_TOKEN = "<|endoftext|>"


class Screen(Talk):
    """Shows a screen after every turn."""

    async def begin(self, task: object) -> Observation:
        self.number = 0
        return pictured("user", "Look.", b"png0")

    async def reply(self, text: str) -> Observation | None:  # type: ignore[override]  # wider than Talk's
        if text == "done":
            return None
        self.number += 1
        return pictured("user", f"Turn {self.number}.", b"png%d" % self.number)


class SlidingScreen(Screen):
    context = SlidingImages(2)


@st.composite
def histories(draw: st.DrawFn) -> Observation:
    """Messages of text and images in any order; each image is its number."""
    texts = st.text(max_size=3).map(lambda text: TextPart(type="text", text=text))
    parts = st.lists(st.just(IMAGE) | texts, max_size=4)
    contents = draw(st.lists(st.text(max_size=3) | parts, max_size=6))
    messages = tuple(Message(role="user", content=content) for content in contents)
    return Observation(messages=messages, images=tuple(b"%d" % n for n in range(count_images(messages))))


def placed(shown: Observation) -> list[tuple[int, bytes]]:
    """(message, image) of each image part."""
    images = iter(shown["images"])
    return [(n, png) for n, m in enumerate(shown["messages"]) for png in islice(images, count_images([m]))]


@given(histories())
def test_append_only_shows_everything(history: Observation) -> None:
    assert AppendOnly().shown(history) == history


@given(histories(), st.integers(0, 4))
def test_the_newest_images_stay_where_they_are_and_no_word_is_lost(history: Observation, keep: int) -> None:
    shown = SlidingImages(keep, instead="").shown(history)
    assert placed(shown) == placed(history)[-keep:] * bool(keep)
    assert len(shown["images"]) == count_images(shown["messages"]) == min(keep, len(history["images"]))
    for before, after in zip(history["messages"], shown["messages"], strict=True):
        words = (text_of(message["content"], image="").replace("\n", "") for message in (before, after))
        assert next(words) == next(words)


def test_a_dropped_image_leaves_a_word_and_its_message_becomes_plain_text() -> None:
    shown = SlidingImages(1).shown(joined([pictured("user", "one", b"1"), pictured("user", "two", b"2")]))
    assert [message["content"] for message in shown["messages"]] == [
        "[an earlier screenshot]\none",
        [IMAGE, {"type": "text", "text": "two"}],
    ]


def test_a_negative_number_of_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep=-1"):
        SlidingImages(-1)


def test_a_text_stays_one_message_of_the_role() -> None:
    assert observation("42", "tool", name="python")["messages"][0]["content"] == "42"


# --- in a rollout -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(write_model(tmp_path_factory.mktemp("vision"), VISION))


def screens(*numbers: int) -> tuple[bytes, ...]:
    return tuple(b"png%d" % number for number in numbers)


def test_a_growing_history_of_images_is_one_segment_that_holds_them_all(vision: Renderer) -> None:
    engine = Scripted(*(say(vision, word) for word in ("a", "b", "done")))
    episode = play(engine, vision, env_class=Screen)
    assert [segment.images for segment in episode.segments] == [screens(0, 1, 2)]
    assert engine.images == [screens(0), screens(0, 1), screens(0, 1, 2)]
    assert [prompt.count(vision.special.tokens[IMAGE_TOKEN].id) for prompt in engine.prompts] == [1, 2, 3]


def test_a_turn_that_no_longer_shows_an_image_is_a_segment_of_its_own(vision: Renderer) -> None:
    engine = Scripted(*(say(vision, word) for word in ("a", "b", "c", "done")))
    episode = play(engine, vision, env_class=SlidingScreen)
    assert [segment.images for segment in episode.segments] == [screens(0, 1), screens(1, 2), screens(2, 3)]
    assert [segment.num_actions for segment in episode.segments] == [4, 2, 5]
    assert engine.images == [screens(0), screens(0, 1), screens(1, 2), screens(2, 3)]
    assert [prompt.count(vision.special.tokens[IMAGE_TOKEN].id) for prompt in engine.prompts] == [1, 2, 2, 2]
    last = vision.decode(engine.prompts[-1])
    assert last.count("[an earlier screenshot]") == 2
    assert "Turn 3." in last


def test_a_model_that_reads_text_only_is_told_that_there_was_an_image(tmp_path: Path) -> None:
    qwen3 = Renderer(write_model(tmp_path, QWEN3))
    engine = Scripted(say(qwen3, "a"), say(qwen3, "done"))
    (segment,) = play(engine, qwen3, env_class=Screen).segments
    assert (segment.images, engine.images) == ((), [(), ()])
    assert "[image]Turn 1." in qwen3.decode(engine.prompts[-1])
