"""The fixed sequence on which engine and trainer must agree after each publication."""

from __future__ import annotations

from wayfinder.chat.parse import format_action
from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor
from wayfinder.config.schema import Config
from wayfinder.envs.protocol import make_env
from wayfinder.runtime.workers import Probe
from wayfinder.types import frame_hash

# Moves into a wall leave the frame as it is; of four directions at least one changes it.
_DIRECTIONS = (0, 1, 2, 3)


def make_probe(config: Config, processor) -> Probe:
    """Two turns of the first evaluation task, with two frames, as an episode would render them.

    The replies are written here, not sampled: any ids serve, but such ones exercise the same path.
    """
    vision = VisionProcessor(processor)
    tokenizer = processor.tokenizer
    env = make_env(config.env.id, str(config.env.kind))
    action_format = str(config.env.action_format)
    first = env.reset(config.eval.first_seed)
    prompt = env.prompt(action_format)
    renderer = ChatRenderer(tokenizer, vision.tokens, prompt, str(config.env.prompt_role))
    second, feedback, reply = first, "", ""
    for direction in _DIRECTIONS:
        reply = format_action(direction, action_format)
        result = env.step(f"('move', {direction})", None)
        second, feedback = result.frame, result.feedback
        if frame_hash(second) != frame_hash(first):
            break
    env.close()
    frames = [first, second]
    pads = [(vision.num_tokens(*frame.shape[:2]),) for frame in frames]
    reply_ids = (*tokenizer.encode(reply, add_special_tokens=False), renderer.end_of_turn)
    ids = (
        *renderer.prefix_ids,
        *renderer.observation("", pads[0]).opening,
        *reply_ids,
        *renderer.observation(feedback, pads[1]).following,
        *reply_ids,
    )
    names = [frame_hash(frame) for frame in frames]
    return Probe(ids, tuple(names), dict(zip(names, frames, strict=True)))
