"""The tiny Qwen3-VL from nothing: tokenizer, chat template, processor and random weights.

It is a plain `Qwen3VLForConditionalGeneration` directory: no code of ours is needed to load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from wayfinder.config.sft import TinyModelConfig
from wayfinder.errors import ModelError

END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
VISION_START = "<|vision_start|>"
VISION_END = "<|vision_end|>"
IMAGE_PAD = "<|image_pad|>"
VIDEO_PAD = "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

# ChatML as Qwen writes it: every turn is kept, each ends with the end of turn and a newline.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(corpus: Iterable[str], vocab_size: int, max_positions: int):
    """A byte-level BPE tokenizer whose merges are learnt from `corpus`; any text encodes.

    Digits stand alone and a merge never crosses a line's end; it may cross blanks and punctuation,
    so that a reply costs few decode steps and a known sentence few prompt tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    smallest = len(SPECIAL_TOKENS) + 256
    if vocab_size < smallest:
        raise ModelError(
            f"sft.model.vocab_size={vocab_size}: expected at least {smallest} "
            f"(256 bytes and {len(SPECIAL_TOKENS)} special tokens); give a larger one"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d|[^\d\n]*\n|[^\d\n]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[t for t in SPECIAL_TOKENS if t not in (IM_END, END_OF_TEXT)],
        model_max_length=max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def build_processor(tokenizer, config: TinyModelConfig):
    """Tokenizer, image and video settings in one `Qwen3VLProcessor`; frames take one fixed size."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    pixels = config.image_side**2
    images = {
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
        "patch_size": config.patch_size,
        "temporal_patch_size": 2,
        "merge_size": 1,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**images),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**images),
        chat_template=CHAT_TEMPLATE,
    )


def build_model_config(tokenizer, config: TinyModelConfig):
    """The `Qwen3VLConfig` of this shape, with the token ids of `tokenizer`."""
    from transformers import Qwen3VLConfig

    half = config.text_head_dim // 2
    height = width = half // 3
    grid = config.image_side // config.patch_size
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL_TOKENS}
    model_config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": config.text_width,
            "intermediate_size": config.text_mlp,
            "num_hidden_layers": config.text_depth,
            "num_attention_heads": config.text_heads,
            "num_key_value_heads": config.text_kv_heads,
            "head_dim": config.text_head_dim,
            "max_position_embeddings": config.max_positions,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [half - height - width, height, width],
            },
            "bos_token_id": ids[END_OF_TEXT],
            "eos_token_id": ids[IM_END],
            "pad_token_id": ids[END_OF_TEXT],
            "tie_word_embeddings": False,
        },
        vision_config={
            "depth": config.vision_depth,
            "hidden_size": config.vision_width,
            "intermediate_size": config.vision_mlp,
            "num_heads": config.vision_heads,
            "patch_size": config.patch_size,
            "temporal_patch_size": 2,
            "spatial_merge_size": 1,
            "out_hidden_size": config.text_width,
            "num_position_embeddings": grid**2,
            "deepstack_visual_indexes": list(config.deepstack_levels),
        },
        image_token_id=ids[IMAGE_PAD],
        video_token_id=ids[VIDEO_PAD],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=False,
    )
    model_config.architectures = ["Qwen3VLForConditionalGeneration"]
    return model_config


def build_model(tokenizer, config: TinyModelConfig, seed: int):
    """The model with random weights drawn from `seed` (fp32), its eos list set for generation."""
    import torch
    from transformers import GenerationConfig, Qwen3VLForConditionalGeneration

    model_config = build_model_config(tokenizer, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLForConditionalGeneration(model_config)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.convert_tokens_to_ids(t) for t in (IM_END, END_OF_TEXT)],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
    )
    return model.eval()


def save_model_dir(path: Path, model, processor) -> None:
    """Writes all that transformers and vLLM load: weights, configs, tokenizer, template.

    `preprocessor_config.json` stands beside the combined processor file because readers differ in
    which of the two they look for.
    """
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path, safe_serialization=True)
    processor.save_pretrained(path)
    processor.image_processor.save_pretrained(path)
    (path / "video_preprocessor_config.json").write_text(
        json.dumps(processor.video_processor.to_dict(), indent=2, default=str) + "\n"
    )


def create_random_model(
    path: Path, config: TinyModelConfig, corpus: Iterable[str], seed: int
) -> None:
    """Writes a random tiny model to `path`; a function of its arguments alone."""
    tokenizer = build_tokenizer(corpus, config.vocab_size, config.max_positions)
    processor = build_processor(tokenizer, config)
    save_model_dir(path, build_model(tokenizer, config, seed), processor)
