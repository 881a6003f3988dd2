"""Messages and frames to token ids, append-only.

The chat template is never applied to a conversation that holds sampled text. It is rendered once
with stand-ins for the replies, cut where the replies stand, and the pieces are encoded: a context
is those pieces with the sampled ids between them. So no sampled id is ever decoded and encoded
again, and text between replies is what the template writes, to the byte.
"""

from __future__ import annotations

from dataclasses import dataclass

from wayfinder.chat.vision import VisionTokens
from wayfinder.errors import TemplateError
from wayfinder.types import Turn

# It holds a thought, because some templates rewrite only replies that do.
_REPLY = "<think>[[thought]]</think>[[reply-{}]]"
_FIRST = "[[first]]"


@dataclass(frozen=True, slots=True)
class Observation:
    """One user message as ids, with one image pad for each image (`collapsed`) or for each image
    token (`expanded`). `opening`: right behind the prefix. `following`: behind a closed reply."""

    opening: tuple[int, ...]
    following: tuple[int, ...]


class ChatRenderer:
    """Turns a task prompt and observations into ids for one tokenizer and one chat template.

    `prompt_role` says who gives the task: a system message, or the first user message (then the
    first frame follows in that same message). Raises `TemplateError` when the template rewrites
    earlier turns, because then no append-only history exists.
    """

    def __init__(self, tokenizer, vision: VisionTokens, prompt: str, prompt_role: str = "system"):
        self._tokenizer = tokenizer
        self._vision = vision
        self._prompt = prompt
        self._role = prompt_role
        self.end_of_turn = int(tokenizer.eos_token_id)
        self._eot_text = tokenizer.eos_token
        self._prefix_text = self._find_prefix()
        self._check_append_only()
        self.prefix_ids = self._encode(self._prefix_text)
        self._cache: dict[tuple[str, tuple[int, ...]], Observation] = {}

    def observation(self, feedback: str, image_tokens: tuple[int, ...]) -> Observation:
        """The message that holds `feedback` and images of `image_tokens` pads each, expanded."""
        key = (feedback, image_tokens)
        if key not in self._cache:
            opening, following = self._observation_text(feedback, len(image_tokens))
            self._cache[key] = Observation(
                opening=self._expand(self._encode(opening), image_tokens),
                following=self._expand(self._encode(following), image_tokens),
            )
        return self._cache[key]

    def closing_ids(self, reply_ids: tuple[int, ...]) -> tuple[int, ...]:
        """What the template puts behind a reply that did not end itself with the end of turn."""
        return () if reply_ids and reply_ids[-1] == self.end_of_turn else (self.end_of_turn,)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _expand(self, ids: tuple[int, ...], image_tokens: tuple[int, ...]) -> tuple[int, ...]:
        pad = self._vision.image_pad
        if ids.count(pad) != len(image_tokens):
            raise TemplateError(
                f"chat template: {len(image_tokens)} images in a message gave {ids.count(pad)} "
                f"image pads; expected one pad for each image"
            )
        counts = iter(image_tokens)
        expanded: list[int] = []
        for token in ids:
            expanded.extend([token] * next(counts) if token == pad else [token])
        return tuple(expanded)

    def _messages(self, feedbacks: list[str], num_images: int, replies: int) -> list[dict]:
        """`feedbacks` user messages with stand-in replies between them (`replies` of them)."""
        messages: list[dict] = []
        if self._role == "system":
            messages.append({"role": "system", "content": self._prompt})
        for index, feedback in enumerate(feedbacks):
            content: list[dict] = []
            if index == 0 and self._role == "user":
                content.append({"type": "text", "text": self._prompt + "\n"})
            if feedback:
                content.append({"type": "text", "text": feedback})
            content += [{"type": "image"}] * num_images
            messages.append({"role": "user", "content": content})
            if index < replies:
                messages.append({"role": "assistant", "content": _REPLY.format(index)})
        return messages

    def _render(self, messages: list[dict], ask: bool) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=ask
        )

    def _find_prefix(self) -> str:
        text = self._render(self._messages([_FIRST], 0, replies=0), ask=True)
        head, found, _ = text.partition(_FIRST)
        if not found:
            raise TemplateError("chat template: the text of a user message is not in its rendering")
        if self._role == "system":
            # The user header belongs to the observation, or a window could not start with it.
            alone = self._render([{"role": "system", "content": self._prompt}], ask=False)
            if not head.startswith(alone):
                raise TemplateError(
                    "chat template: the system message is rendered differently when a user message "
                    "follows; set env.prompt_role=user"
                )
            return alone
        return head

    def _observation_text(self, feedback: str, num_images: int) -> tuple[str, str]:
        first = self._render(self._messages([feedback], num_images, replies=0), ask=True)
        later = self._render(self._messages(["-", feedback], num_images, replies=1), ask=True)
        between = later.split(_REPLY.format(0))[1].removeprefix(self._eot_text)
        return first.removeprefix(self._prefix_text), between

    def _check_append_only(self) -> None:
        """One more turn must only append, or training would see other ids than sampling."""
        asked = self._render(self._messages(["a", "b"], 1, replies=1), ask=True)
        told = self._render(self._messages(["a", "b", "c"], 1, replies=2), ask=True)
        expected = asked + _REPLY.format(1) + self._eot_text
        if not asked.startswith(self._prefix_text) or not told.startswith(expected):
            raise TemplateError(
                "chat template: it rewrites earlier turns when a turn is added (a template that "
                "drops earlier reasoning does this), so token histories cannot be append-only. "
                f"Expected the rendering to start with {expected[-120:]!r}; "
                f"found {told[: len(expected)][-120:]!r}. Use a template that keeps earlier turns."
            )


def context_ids(
    prefix_ids: tuple[int, ...],
    turns: list[Turn] | tuple[Turn, ...],
    window_start: int,
    observation: Observation,
) -> tuple[int, ...]:
    """What the model reads before it gives the next reply.

    `turns` are the finished ones; `observation` is the one to answer. With `window_start ==
    len(turns)` the observation itself opens the window.
    """
    ids = list(prefix_ids)
    for index in range(window_start, len(turns)):
        turn = turns[index]
        ids += turn.opening_ids if index == window_start else turn.observation_ids
        ids += turn.reply_ids
        ids += turn.closing_ids
    ids += observation.opening if window_start == len(turns) else observation.following
    return tuple(ids)


def window_start(turn: int, history: int | None) -> int:
    """First turn that is visible when turn `turn` is answered; `history=None` shows all of them."""
    return 0 if history is None else max(0, turn + 1 - history)
