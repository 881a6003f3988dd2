"""Contexts: append-only, and equal to what tokenizer, template and processor make of the messages.

The reference is transformers' own processor on the rendered conversation: it encodes the text in
one piece and expands the placeholders by itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest

from support.scripted import picture
from wayfinder.chat.render import ChatRenderer, context_ids, window_start
from wayfinder.chat.vision import VisionProcessor, collapse_pads
from wayfinder.errors import TemplateError
from wayfinder.train.tiny import CHAT_TEMPLATE
from wayfinder.types import Turn

PROMPT = "You see a maze from above.\nReply with one action."
SIZES = [(225, 225), (100, 400), (150, 200), (64, 144), (400, 100)]
NUM_PADS = [81, 72, 70, 84, 72]  # for the tiny model's budget of 144 x 144 px
FEEDBACKS = ["", "Moved.", "Wall.", "Invalid: no action found.", "Moved."]
REPLIES = ["('move', 3)", "I go up.\n('move', 1)", "  hm\n\n", "('move', 2)"]
ROLES = ["system", "user"]

# What Qwen2 does: a system message of its own where none is given.
DEFAULT_SYSTEM = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' -}}{%- endif -%}" + CHAT_TEMPLATE
)
# What templates of reasoning models do: only the newest reply keeps its thoughts.
DROPS_THOUGHTS = CHAT_TEMPLATE.replace(
    "{{- message['content'] -}}",
    "{%- if message['role'] == 'assistant' and not loop.last -%}"
    "{{- message['content'].split('</think>')[-1] -}}"
    "{%- else -%}{{- message['content'] -}}{%- endif -%}",
)
DROPS_OLD_TURNS = CHAT_TEMPLATE.replace(
    "{%- for message in messages -%}", "{%- for message in messages[:1] + messages[1:][-3:] -%}"
)
SYSTEM_INSIDE_USER = """\
{%- for message in messages -%}
{%- if message['role'] == 'system' and messages | length > 1 -%}{%- continue -%}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if loop.index0 == 1 and messages[0]['role'] == 'system' -%}
{{- messages[0]['content'] + '\\n' -}}
{%- endif -%}
{%- if message['content'] is string -%}{{- message['content'] -}}
{%- else -%}{%- for part in message['content'] -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] -}}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass
class Bench:
    """A processor with one chat template."""

    processor: object
    renderer: ChatRenderer
    role: str

    @property
    def tokenizer(self):
        return self.processor.tokenizer

    def text(self, feedbacks, replies, num_images=1) -> str:
        """The template's rendering of the conversation, up to the next reply."""
        messages = []
        if self.role == "system":
            messages.append({"role": "system", "content": PROMPT})
        for index, feedback in enumerate(feedbacks):
            content = [{"type": "text", "text": feedback}] if feedback else []
            if index == 0 and self.role == "user":
                content.insert(0, {"type": "text", "text": PROMPT + "\n"})
            content += [{"type": "image"}] * num_images
            messages.append({"role": "user", "content": content})
            if index < len(replies):
                messages.append({"role": "assistant", "content": replies[index]})
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def reference_ids(self, feedbacks, replies, sizes, num_images=1) -> tuple[int, ...]:
        """The same as ids, images expanded, by the processor alone."""
        text = self.text(feedbacks, replies, num_images)
        images = [picture(*size) for size in sizes]
        return tuple(self.processor(text=[text], images=images)["input_ids"][0])

    def ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def make_bench(processor, role: str, template: str = CHAT_TEMPLATE) -> Bench:
    other = copy.deepcopy(processor)
    other.tokenizer.chat_template = template
    tokens = VisionProcessor(other).tokens
    return Bench(other, ChatRenderer(other.tokenizer, tokens, PROMPT, role), role)


@pytest.fixture(scope="module", params=ROLES)
def bench(processor, request):
    return make_bench(processor, request.param)


def turn(renderer: ChatRenderer, number: int, reply_ids: tuple[int, ...]) -> Turn:
    """Turn `number` of the conversation above, answered with `reply_ids`."""
    observation = renderer.observation(FEEDBACKS[number], (NUM_PADS[number],))
    return Turn(
        window_start=0,
        observation_ids=observation.following if number else observation.opening,
        opening_ids=observation.opening,
        frames=(f"frame {number}",),
        reply_ids=reply_ids,
        logprobs=(-1.0,) * len(reply_ids),
        closing_ids=renderer.closing_ids(reply_ids),
        finish_reason="stop",
        text="",
        action=None,
        parse_error=None,
        feedback="",
        executed=False,
    )


def play(renderer: ChatRenderer, replies: list[tuple[int, ...]]):
    """The turns that `replies` make, and the context before each of them and the next one."""
    turns, contexts = [], []
    for number in range(len(replies) + 1):
        observation = renderer.observation(FEEDBACKS[number], (NUM_PADS[number],))
        contexts.append(context_ids(renderer.prefix_ids, turns, 0, observation))
        if number < len(replies):
            turns.append(turn(renderer, number, replies[number]))
    return turns, contexts


def finished(bench: Bench, texts: list[str]) -> list[tuple[int, ...]]:
    """Replies that end with the end of turn, as the engine returns them."""
    return [(*bench.ids(text), bench.renderer.end_of_turn) for text in texts]


@pytest.mark.parametrize(("size", "count"), list(zip(SIZES, NUM_PADS, strict=True)))
def test_pads_are_counted_as_the_image_processor_cuts_patches(processor, size, count):
    vision = VisionProcessor(processor)
    pixels, grid = vision.patches([picture(*size)])
    assert vision.num_tokens(*size) == count == int(grid[0].prod()) // vision.merge_size**2
    assert len(pixels) == int(grid[0].prod())


def test_every_context_extends_the_one_before_and_its_reply(bench):
    replies = finished(bench, REPLIES)
    _, contexts = play(bench.renderer, replies)
    for before, reply, after in zip(contexts, replies, contexts[1:], strict=False):
        assert after[: len(before) + len(reply)] == before + reply
        assert len(after) > len(before) + len(reply)


def test_contexts_are_what_the_processor_makes_of_the_whole_conversation(bench):
    replies = finished(bench, REPLIES)
    _, contexts = play(bench.renderer, replies)
    for number, context in enumerate(contexts):
        shown = number + 1
        assert context == bench.reference_ids(FEEDBACKS[:shown], REPLIES[:number], SIZES[:shown])


def test_the_newline_behind_the_end_of_turn_is_there_once(bench):
    replies = finished(bench, REPLIES)
    _, contexts = play(bench.renderer, replies)
    between = contexts[1][len(contexts[0]) + len(replies[0]) - 1 :]
    assert bench.tokenizer.decode(between).startswith("<|im_end|>\n<|im_start|>user\nMoved.")
    assert bench.tokenizer.decode(contexts[4]).count("<|im_end|>\n<|im_start|>user\n") == (
        5 if bench.role == "system" else 4
    )


def test_each_placeholder_is_expanded_once_however_many_turns_follow(bench):
    pad = VisionProcessor(bench.processor).tokens.image_pad
    _, contexts = play(bench.renderer, finished(bench, REPLIES))
    assert [c.count(pad) for c in contexts] == [sum(NUM_PADS[: k + 1]) for k in range(5)]


def test_collapsing_takes_expansion_back(bench):
    pad = VisionProcessor(bench.processor).tokens.image_pad
    _, contexts = play(bench.renderer, finished(bench, REPLIES))
    for number, context in enumerate(contexts):
        text = bench.text(FEEDBACKS[: number + 1], REPLIES[:number])
        assert tuple(collapse_pads(context, pad)) == bench.ids(text)


@pytest.mark.parametrize("pads", [(81, 72), (1, 1), (72, 1)])
def test_two_images_in_one_message(bench, pads):
    pad = VisionProcessor(bench.processor).tokens.image_pad
    observation = bench.renderer.observation("Moved.", pads)
    text = bench.text(["Moved."], [], num_images=2)
    alone = bench.ids(text)[len(bench.renderer.prefix_ids) :]
    assert alone.count(pad) == 2
    assert tuple(collapse_pads(observation.opening, pad)) == alone
    shown = "".join("x" if token == pad else " " for token in observation.opening)
    assert [len(run) for run in shown.split()] == list(pads)
    following = collapse_pads(observation.following, pad)
    assert (
        bench.tokenizer.decode(following)
        == "\n" + bench.text(["-", "Moved."], ["r"], 2).split("r<|im_end|>\n", 1)[1]
    )


def test_two_images_in_one_message_equal_the_processors_expansion(bench):
    prefix = bench.renderer.prefix_ids
    opening = bench.renderer.observation("Moved.", (81, 72)).opening
    assert prefix + opening == bench.reference_ids(["Moved."], [], SIZES[:2], num_images=2)


def test_a_window_starts_like_a_conversation_of_its_own(bench):
    turns, _ = play(bench.renderer, finished(bench, REPLIES))
    last = bench.renderer.observation(FEEDBACKS[4], (NUM_PADS[4],))
    for start in range(5):
        assert context_ids(bench.renderer.prefix_ids, turns, start, last) == bench.reference_ids(
            FEEDBACKS[start:], REPLIES[start:], SIZES[start:]
        )


def test_which_turns_a_window_shows():
    assert [window_start(turn, None) for turn in range(4)] == [0, 0, 0, 0]
    assert [window_start(turn, 1) for turn in range(4)] == [0, 1, 2, 3]
    assert [window_start(turn, 3) for turn in range(6)] == [0, 0, 0, 1, 2, 3]


def test_an_observation_is_a_function_of_feedback_and_image_sizes(bench):
    first = bench.renderer.observation("Moved.", (81,))
    assert bench.renderer.observation("Wall.", (81,)) != first
    assert bench.renderer.observation("Moved.", (72,)) != first
    assert bench.renderer.observation("Moved.", (81,)) == first


@pytest.mark.parametrize(
    ("ending", "closed"),
    [
        ("", True),  # cut by the token limit
        ("<|endoftext|>", True),  # the second id that ends a reply: the template knows only one
        ("<|im_end|>", False),
    ],
)
def test_a_reply_is_closed_as_the_template_closes_it(bench, ending, closed):
    said = "('move', 3" + ending
    reply = bench.ids(said)
    end = bench.renderer.end_of_turn
    assert bench.renderer.closing_ids(reply) == ((end,) if closed else ())
    replies = [reply, *finished(bench, REPLIES[1:3])]
    _, contexts = play(bench.renderer, replies)
    texts = [said.removesuffix("<|im_end|>"), *REPLIES[1:3]]
    assert contexts[3] == bench.reference_ids(FEEDBACKS[:4], texts, SIZES[:4])


def test_an_empty_reply_is_closed(bench):
    assert bench.renderer.closing_ids(()) == (bench.renderer.end_of_turn,)


def test_sampled_ids_are_never_encoded_again(bench):
    # Two spellings of one text: the tokenizer would never give the second.
    ids = bench.ids("move")
    spelled = tuple(i for letter in "move" for i in bench.ids(letter))
    assert ids != spelled
    assert bench.tokenizer.decode(spelled) == "move"
    _, contexts = play(bench.renderer, [(*spelled, bench.renderer.end_of_turn)])
    first = len(contexts[0])
    assert contexts[1][first : first + len(spelled)] == spelled


def test_a_template_with_a_system_message_of_its_own(processor):
    bench = make_bench(processor, "user", DEFAULT_SYSTEM)
    assert "You are helpful" in bench.tokenizer.decode(bench.renderer.prefix_ids)
    _, contexts = play(bench.renderer, finished(bench, REPLIES))
    assert contexts[4] == bench.reference_ids(FEEDBACKS, REPLIES, SIZES)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("template", [DROPS_THOUGHTS, DROPS_OLD_TURNS])
def test_a_template_that_rewrites_earlier_turns_is_refused(processor, template, role):
    with pytest.raises(TemplateError, match="rewrites earlier turns when a turn is added"):
        make_bench(processor, role, template)


def test_a_template_that_moves_the_system_message_is_refused_with_the_way_out(processor):
    with pytest.raises(TemplateError, match=r"set env\.prompt_role=user"):
        make_bench(processor, "system", SYSTEM_INSIDE_USER)
    bench = make_bench(processor, "user", SYSTEM_INSIDE_USER)
    _, contexts = play(bench.renderer, finished(bench, REPLIES))
    assert contexts[4] == bench.reference_ids(FEEDBACKS, REPLIES, SIZES)


@pytest.mark.parametrize("placeholder", ["", "<|image_pad|><|image_pad|>"])
def test_a_template_must_write_one_placeholder_for_an_image(processor, placeholder):
    template = CHAT_TEMPLATE.replace("<|image_pad|>", placeholder)
    bench = make_bench(processor, "system", template)
    with pytest.raises(TemplateError, match=r"1 images in a message gave \d image pads"):
        bench.renderer.observation("Moved.", (81,))


def test_a_template_that_loses_the_text_is_refused(processor):
    template = CHAT_TEMPLATE.replace("{{- part['text'] -}}", "")
    with pytest.raises(TemplateError, match="text of a user message"):
        make_bench(processor, "system", template)
