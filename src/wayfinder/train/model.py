"""The policy: a Qwen3-VL with a LoRA adapter on its text model, and its forward pass on samples.

The vision tower is frozen and stays whole on every rank. So its features can be computed once for
each distinct frame of a step, and ranks may see different frames without any collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from wayfinder.batch.packing import sample_key
from wayfinder.batch.positions import mrope_positions
from wayfinder.chat.vision import VisionProcessor
from wayfinder.errors import ModelError
from wayfinder.train.logprobs import chunked_logprobs
from wayfinder.types import Sample

ADAPTER = "default"
REFERENCE = "reference"
_HEAD_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What every rank builds the same policy from."""

    model: str
    dtype: str
    attention: str
    gradient_checkpointing: bool
    packing: bool
    lora_rank: int
    lora_alpha: int
    rslora: bool
    lora_targets: tuple[str, ...]
    adapter: str | None
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class FrameFeatures:
    """What the tower makes of one frame: [tokens, width] for the input and each deepstack level."""

    grid: tuple[int, int]  # height and width in tokens
    embeds: Tensor
    deepstack: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class ForwardInput:
    """Distinct samples of a micro-batch, and where each loss token is read.

    R rows of length L: one for each sample, right-padded, or packed, all in one. N loss tokens over
    all samples, in the order of the samples. A sample that occurs again is computed once, and each
    occurrence reads from it.
    """

    ids: Tensor  # [R, L]
    positions: Tensor  # [3, R, L], or packed [4, 1, L]: places within each sample come first
    visual: Tensor  # bool [R, L]: image pads
    embeds: Tensor  # [image tokens, width]
    deepstack: tuple[Tensor, ...]
    read_row: Tensor  # [M] row and position whose hidden state predicts a distinct loss token
    read_position: Tensor  # [M]
    targets: Tensor  # [M]
    token: Tensor  # [N] index into the M distinct loss tokens


class PolicyModel(nn.Module):
    """Forward: `ForwardInput` to log-probs and entropies of its loss tokens.

    One module with one forward, because FSDP gathers and frees parameters around forward calls.
    """

    def __init__(self, wrapped: nn.Module, temperature: float, banned: Sequence[int]) -> None:
        super().__init__()
        self.wrapped = wrapped
        self._temperature = temperature
        self.register_buffer("_banned", torch.tensor(banned, dtype=torch.long), persistent=False)

    @property
    def qwen(self) -> nn.Module:
        """The transformers model inside the adapter wrapper."""
        return self.wrapped.base_model.model

    def forward(self, batch: ForwardInput, raw: bool = False) -> tuple[Tensor, Tensor]:
        """Log-probs [N] and entropies [N], float32. `raw`: at temperature 1, nothing banned."""
        text = self.qwen.model.language_model
        embeds = text.embed_tokens(batch.ids)
        if batch.embeds.shape[0]:
            embeds = embeds.masked_scatter(batch.visual[..., None], batch.embeds.to(embeds.dtype))
        hidden = text(
            inputs_embeds=embeds,
            # Three axes and no mask: plain causal attention. Pads stand on the right, where no
            # real token looks. With four, the first tells transformers where samples begin, and it
            # makes a block-diagonal mask (sdpa, eager) or sequence lengths (flash attention).
            position_ids=batch.positions,
            visual_pos_masks=batch.visual,
            deepstack_visual_embeds=list(batch.deepstack),
            use_cache=False,
        ).last_hidden_state
        read = hidden[batch.read_row, batch.read_position]
        logprobs, entropies = chunked_logprobs(
            read,
            self.qwen.lm_head,
            batch.targets,
            1.0 if raw else self._temperature,
            self._banned[:0] if raw else self._banned,
            _HEAD_CHUNK,
        )
        return logprobs[batch.token], entropies[batch.token]


def load_policy(spec: PolicySpec, banned: Sequence[int]) -> PolicyModel:
    """Build the policy on the CPU: frozen base, trainable float32 adapter, same on every rank."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import Qwen3VLForConditionalGeneration

    try:
        base = Qwen3VLForConditionalGeneration.from_pretrained(
            spec.model,
            dtype=getattr(torch, spec.dtype),
            attn_implementation=spec.attention,
        )
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path={spec.model}: cannot be loaded as a Qwen3-VL: {error}") from (
            error
        )
    base.requires_grad_(False)
    if spec.adapter is not None:
        wrapped = PeftModel.from_pretrained(base, spec.adapter, is_trainable=True)
        wrapped.load_adapter(spec.adapter, adapter_name=REFERENCE, is_trainable=False)
        wrapped.set_adapter(ADAPTER)
    else:
        # Adapter matrices start at random: every rank must draw the same ones.
        torch.manual_seed(spec.seed)
        wrapped = get_peft_model(
            base,
            LoraConfig(
                r=spec.lora_rank,
                lora_alpha=spec.lora_alpha,
                use_rslora=spec.rslora,
                lora_dropout=0.0,
                bias="none",
                target_modules=adapted_modules(base, spec.lora_targets),
                task_type="CAUSAL_LM",
            ),
        )
    policy = PolicyModel(wrapped, spec.temperature, banned)
    for name, parameter in policy.named_parameters():
        trainable = f".{ADAPTER}." in name
        parameter.requires_grad_(trainable)
        if ".lora_" in name:
            # bfloat16 swallows updates below one part in 256 (see AReaL issue 1634).
            parameter.data = parameter.data.float()
    if spec.gradient_checkpointing:
        policy.qwen.model.language_model.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    policy.train()
    return policy


def adapted_modules(base: nn.Module, targets: Sequence[str]) -> list[str]:
    """Full names of the text model's linear layers called `targets`; every target must be there.

    Full names, because a suffix such as `q_proj` may exist in another part of the model.
    """
    found: dict[str, list[str]] = {target: [] for target in targets}
    for name, module in base.named_modules():
        target = name.rsplit(".", 1)[-1]
        if isinstance(module, nn.Linear) and target in found and ".language_model.layers." in name:
            found[target].append(name)
    missing = [target for target, names in found.items() if not names]
    if missing:
        raise ModelError(
            f"model.lora.targets: {missing} are not linear layers of the text model's decoder "
            "layers; expected names such as q_proj, v_proj, gate_proj"
        )
    return sorted(name for names in found.values() for name in names)


@contextmanager
def reference_policy(policy: PolicyModel, has_start_adapter: bool) -> Iterator[None]:
    """Inside, the policy is the one that training started from: adapter off, or the start adapter.

    The active adapter is switched by hand: PEFT's own switch also changes `requires_grad`, which
    must not change under FSDP.
    """
    from peft.tuners.lora import LoraLayer

    if not has_start_adapter:
        with policy.wrapped.disable_adapter():
            yield
        return
    layers = [module for module in policy.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer._active_adapter = [REFERENCE]
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = [ADAPTER]


@torch.no_grad()
def encode_frames(
    policy: PolicyModel,
    vision: VisionProcessor,
    frames: Mapping[str, np.ndarray],
    names: Sequence[str],
    device: torch.device,
    per_call: int = 64,
) -> dict[str, FrameFeatures]:
    """Features of the named frames. The tower is frozen, so they hold for a whole run."""
    features: dict[str, FrameFeatures] = {}
    model = policy.qwen.model
    for start in range(0, len(names), per_call):
        part = names[start : start + per_call]
        pixels, grids = vision.patches([frames[name] for name in part])
        grids = grids.to(device)
        out = model.get_image_features(pixels.to(device), grids)
        for index, name in enumerate(part):
            _, height, width = (int(x) for x in grids[index])
            features[name] = FrameFeatures(
                grid=(height // vision.merge_size, width // vision.merge_size),
                embeds=out.pooler_output[index],
                deepstack=tuple(level[index] for level in out.deepstack_features),
            )
    return features


def forward_input(
    samples: Sequence[Sample],
    features: Mapping[str, FrameFeatures],
    image_pad: int,
    device: torch.device,
    num_deepstack: int,
    packed: bool = False,
) -> ForwardInput:
    """Stack the distinct samples of a micro-batch, padded or packed into one row.

    Raises ValueError when a sample's image pads and frames do not match; a missing frame is a
    KeyError: no image is ever left out in silence.
    """
    numbers: dict[tuple, int] = {}
    distinct: list[Sample] = []
    for sample in samples:
        if numbers.setdefault(sample_key(sample), len(numbers)) == len(distinct):
            distinct.append(sample)
    lengths = [len(sample.ids) for sample in distinct]
    if packed:
        shape = (1, max(1, sum(lengths)))
        starts = [(0, begin) for begin in np.cumsum([0, *lengths])[:-1]]
    else:
        shape = (max(1, len(distinct)), max(lengths, default=1))
        starts = [(row, 0) for row in range(len(distinct))]
    ids = np.zeros(shape, dtype=np.int64)
    positions = np.zeros((3, *shape), dtype=np.int64)
    places = np.zeros((1, *shape), dtype=np.int64)
    visual = np.zeros(shape, dtype=bool)
    shown = [features[name] for sample in distinct for name in sample.frames]
    reads: list[np.ndarray] = []
    first_token = [0]
    for (row, begin), sample in zip(starts, distinct, strict=True):
        inside = slice(begin, begin + len(sample.ids))
        grids = [features[name].grid for name in sample.frames]
        ids[row, inside] = sample.ids
        positions[:, row, inside] = mrope_positions(sample.ids, grids, image_pad)
        places[0, row, inside] = np.arange(len(sample.ids))
        visual[row, inside] = sample.ids == image_pad
        where = np.flatnonzero(sample.loss_mask)
        if len(where) and where[0] == 0:
            raise ValueError("the first id of a sample cannot have loss: nothing predicts it")
        reads.append(np.stack([np.full(len(where), row), begin + where]))
        first_token.append(first_token[-1] + len(where))
    read = np.concatenate(reads, axis=1) if reads else np.zeros((2, 0), dtype=np.int64)
    token = [
        np.arange(first_token[number], first_token[number + 1])
        for number in (numbers[sample_key(sample)] for sample in samples)
    ]
    ids_tensor = torch.from_numpy(ids).to(device)
    row, position = torch.from_numpy(read).to(device)
    empty = torch.zeros(0, 1, device=device)
    deepstack = [[feature.deepstack[level] for feature in shown] for level in range(num_deepstack)]
    all_positions = np.concatenate([places, positions]) if packed else positions
    all_tokens = np.concatenate(token) if token else np.zeros(0, dtype=np.int64)
    return ForwardInput(
        ids=ids_tensor,
        positions=torch.from_numpy(all_positions).to(device),
        visual=torch.from_numpy(visual).to(device),
        embeds=torch.cat([feature.embeds for feature in shown]) if shown else empty,
        deepstack=tuple(torch.cat(level) for level in deepstack if level),
        read_row=row,
        read_position=position - 1,
        targets=ids_tensor[row, position],
        token=torch.from_numpy(all_tokens).to(device),
    )


def adapter_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gathered parameters to PEFT's file form: full tensors under PEFT's key names, on the CPU."""
    tensors = {}
    for name, tensor in state.items():
        if f".{ADAPTER}." in name and ".lora_" in name:
            key = name.removeprefix("wrapped.").replace(f".{ADAPTER}.", ".")
            # A copy also where the parameter itself lies whole on the CPU.
            tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
    return tensors


def adapter_config(policy: PolicyModel, model: str) -> dict:
    """`adapter_config.json` of the trained adapter, in PEFT's form."""
    config = policy.wrapped.peft_config[ADAPTER].to_dict()
    config["base_model_name_or_path"] = model
    config["inference_mode"] = True
    # Sets do not keep an order; a file that is hashed needs one.
    config["target_modules"] = sorted(config["target_modules"])
    return {key: value for key, value in config.items() if _is_json(value)}


def _is_json(value: object) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | type(None))
