"""The tiny model's files: tokenizer, chat template, processor, shape."""

import json

import numpy as np
import pytest
import torch

from wayfinder.chat.parse import FORMATS, format_action
from wayfinder.chat.render import ChatRenderer
from wayfinder.chat.vision import VisionProcessor, collapse_pads, load_processor
from wayfinder.config.sft import TinyModelConfig
from wayfinder.envs.protocol import make_env
from wayfinder.errors import ModelError
from wayfinder.train import tiny
from wayfinder.train.sft import tokenizer_corpus

ACTIONS = (0, 1, 2, 3, "stop")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "model"
    tiny.create_random_model(path, TinyModelConfig(), tokenizer_corpus("maze_2d/easy"), seed=3)
    return path


@pytest.fixture(scope="module")
def processor(model_dir):
    return load_processor(model_dir)


def prompt(action_format: str) -> str:
    env = make_env("maze_2d/easy", "maze2d")
    env.reset(0)
    return env.prompt(action_format)


@pytest.mark.parametrize(
    "text",
    ["", "plain", "naïve 日本語 \U0001f600", "tabs\tand\n\nlines  ", "('move', 3)", "7042"],
)
def test_any_text_survives_the_tokenizer(processor, text):
    tokenizer = processor.tokenizer
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_tokens_are_single_ids_with_their_roles(processor):
    tokenizer = processor.tokenizer
    for token in tiny.SPECIAL_TOKENS:
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|endoftext|>"


@pytest.mark.parametrize("action_format", sorted(FORMATS))
@pytest.mark.parametrize("action", ACTIONS)
def test_a_reply_takes_few_decode_steps(processor, action_format, action):
    ids = processor.tokenizer.encode(format_action(action, action_format))
    assert len(ids) <= 3  # and one more for the end of turn


def test_digits_stand_alone(processor):
    tokens = processor.tokenizer.convert_ids_to_tokens(processor.tokenizer.encode("('move', 0)12"))
    assert [t for t in tokens if any(c.isdigit() for c in t)] == ["0", "1", "2"]


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("action_format", sorted(FORMATS))
def test_the_chat_template_is_append_only_and_prompts_are_short(processor, role, action_format):
    vision = VisionProcessor(processor)
    renderer = ChatRenderer(processor.tokenizer, vision.tokens, prompt(action_format), role)
    assert len(renderer.prefix_ids) <= 40
    observation = renderer.observation("Wall.", (81,))
    assert observation.following.count(vision.tokens.image_pad) == 81
    text = processor.tokenizer.decode(collapse_pads(observation.following, vision.tokens.image_pad))
    assert text == (
        "\n<|im_start|>user\nWall.<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("size", "side"), [(9, 144), (11, 176)])
def test_one_image_token_for_each_cell(processor, size, side):
    config = TinyModelConfig(image_side=side)
    vision = VisionProcessor(tiny.build_processor(processor.tokenizer, config))
    pixels = size * 25
    assert vision.num_tokens(pixels, pixels) == size * size
    _, grids = vision.patches([np.zeros((pixels, pixels, 3), np.uint8)])
    assert grids.tolist() == [[1, size, size]]


def test_the_model_loads_as_a_plain_qwen3_vl(model_dir, processor):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_dir)
    assert type(model).__name__ == "Qwen3VLForConditionalGeneration"
    assert model.dtype == torch.float32
    assert 1_000_000 <= sum(p.numel() for p in model.parameters()) <= 3_000_000
    # A sampled id beyond the tokenizer's could not be decoded.
    assert model.config.text_config.vocab_size == len(processor.tokenizer)
    eos = json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]
    assert processor.tokenizer.convert_ids_to_tokens(eos) == ["<|im_end|>", "<|endoftext|>"]


def test_the_seed_decides_the_weights(processor):
    def weights(seed):
        model = tiny.build_model(processor.tokenizer, TinyModelConfig(), seed)
        return torch.cat([p.flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_vocabulary_without_all_bytes_is_refused():
    with pytest.raises(ModelError, match="vocab_size"):
        tiny.build_tokenizer(["text"], vocab_size=200, max_positions=128)
