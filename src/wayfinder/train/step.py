"""One policy rank: forward passes, updates, and the state that a checkpoint needs.

No ray here: the same class runs in a Ray actor, in a test process, or alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from wayfinder.algo.kl import kl_values
from wayfinder.algo.loss import LossInputs, LossSpec, policy_loss
from wayfinder.batch.plan import MiniBatch
from wayfinder.chat.vision import VisionProcessor, load_processor
from wayfinder.errors import CheckpointError, MismatchError, UpdateError
from wayfinder.train.mismatch import MismatchSums
from wayfinder.train.model import (
    FrameFeatures,
    PolicyModel,
    PolicySpec,
    adapter_config,
    adapter_tensors,
    encode_frames,
    forward_input,
    load_policy,
    reference_policy,
)
from wayfinder.types import MicroBatch


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float  # 0: no clipping


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """Sums of this rank; the driver adds them over ranks."""

    sums: list[dict[str, float]]  # one for each mini-batch, for algo.loss.averaged
    grad_norms: list[float]  # global, before clipping
    mismatch: MismatchSums


class PolicyRank:
    """The policy on one rank of an FSDP2 group. Every method is a collective of all ranks."""

    def __init__(
        self,
        policy: PolicySpec,
        loss: LossSpec,
        optimizer: OptimizerSpec,
        device: str,
        mismatch_stop: float,
    ) -> None:
        self._spec = policy
        self._loss = loss
        self._optimizer_spec = optimizer
        self._mismatch_stop = mismatch_stop
        self._device = torch.device(device)
        self._world = dist.get_world_size()
        self._rank = dist.get_rank()
        self._vision = VisionProcessor(load_processor(policy.model))
        self._model = shard(load_policy(policy, self._vision.tokens.banned), device)
        self._trainable = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._trainable,
            lr=optimizer.lr,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        vision_config = self._model.qwen.config.vision_config
        self._num_deepstack = len(vision_config.deepstack_visual_indexes)
        self._features: dict[str, FrameFeatures] = {}

    def forget_frames(self) -> None:
        """Drop the features of the last step's frames."""
        self._features.clear()

    def score(
        self, micro_batches: Sequence[MicroBatch], frames: Mapping[str, np.ndarray], episodes: int
    ) -> np.ndarray:
        """Sums of log(policy / reference) over each episode's tokens of this rank, [episodes]."""
        self._encode(micro_batches, frames)
        sums = torch.zeros(episodes, dtype=torch.float64)
        policy = self._logprobs(micro_batches)
        reference = self._reference(micro_batches)
        for batch, new, old in zip(micro_batches, policy, reference, strict=True):
            sums.index_add_(0, _episodes(batch), kl_values(new, old, "k1").double().cpu())
        return sums.numpy()

    def update(
        self, mini_batches: Sequence[MiniBatch], frames: Mapping[str, np.ndarray], lr: float
    ) -> UpdateResult:
        """One optimizer update for each mini-batch, all measured against the policy at entry.

        Raises MismatchError, on every rank and before any parameter changes, when the engine's
        log-probs are off by more than the configured stop; UpdateError when a gradient is not
        finite.
        """
        for batch in mini_batches:
            self._encode(batch.micro_batches, frames)
        references = [
            self._reference(mini.micro_batches) if self._loss.kl_coef > 0 else None
            for mini in mini_batches
        ]
        # The first mini-batch meets the policy at entry in its own forward pass, unless that pass
        # itself needs to know the sums over whole episodes.
        first = 0 if self._loss.is_sequence_level else 1
        old: list[list[Tensor] | None] = [None] * len(mini_batches)
        mismatch = MismatchSums()
        for index, mini in enumerate(mini_batches[first:], start=first):
            old[index] = self._logprobs(mini.micro_batches)
            for batch, values in zip(mini.micro_batches, old[index], strict=True):
                _measure(mismatch, batch, values)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        sums, norms = [], []
        for index, mini in enumerate(mini_batches):
            self._optimizer.zero_grad(set_to_none=True)
            total: dict[str, float] = {}
            whole = self._episode_sums(mini, old[index], is_first=index == 0)
            for number, batch in enumerate(mini.micro_batches):
                part = self._backward(
                    mini,
                    batch,
                    old[index][number] if old[index] is not None else None,
                    references[index][number] if references[index] is not None else None,
                    whole,
                    mismatch if old[index] is None else None,
                )
                for name, value in part.items():
                    total[name] = total.get(name, 0.0) + value
            if index == 0:
                self._check_mismatch(mismatch)
            norm = self._clip()
            if not math.isfinite(norm):
                raise UpdateError(
                    f"mini-batch {index}: the gradient's norm is {norm}; the policy was left as it "
                    "was before this mini-batch. Usual causes: a learning rate that is too high "
                    "in earlier steps, or a precision that is too low (model.dtype)."
                )
            # A gradient of exactly zero says nothing, but AdamW would move on by its momentum: then
            # groups without signal would act, and differently when they are left out.
            if norm > 0:
                self._optimizer.step()
            norms.append(norm)
            sums.append(total)
        self._optimizer.zero_grad(set_to_none=True)
        return UpdateResult(sums, norms, mismatch)

    @torch.no_grad()
    def probe(self, batch: MicroBatch, frames: Mapping[str, np.ndarray]) -> list[float]:
        """Raw log-probs (temperature 1, nothing banned) of the loss tokens of `batch`."""
        self._encode([batch], frames)
        logprobs, _ = self._model(self._input(batch), raw=True)
        return logprobs.tolist()

    def adapter_state(self) -> tuple[dict[str, Tensor], dict]:
        """Full adapter tensors and config in PEFT's form; tensors on rank 0 only, {} elsewhere."""
        state = get_model_state_dict(
            self._model,
            options=StateDictOptions(
                full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
            ),
        )
        return adapter_tensors(state), adapter_config(self._model, self._spec.model)

    def load_adapter_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over full adapter tensors in PEFT's form; refuses missing or odd-shaped ones."""
        current, _ = self.adapter_state()
        shapes = [{name: tuple(t.shape) for name, t in current.items()}]
        dist.broadcast_object_list(shapes, src=0)
        given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if given != shapes[0]:
            wrong = sorted(set(given.items()) ^ set(shapes[0].items()))[:4]
            raise CheckpointError(f"adapter: tensors do not fit model.lora, for example {wrong}")
        state = {_parameter_name(name): tensor for name, tensor in tensors.items()}
        set_model_state_dict(
            self._model,
            state,
            options=StateDictOptions(full_state_dict=True, strict=False),
        )

    def optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """AdamW's moments as full tensors `<parameter>/<moment>` (rank 0 only), and step counts."""
        state = get_optimizer_state_dict(
            self._model,
            self._optimizer,
            options=StateDictOptions(full_state_dict=True, cpu_offload=True),
        ).get("state", {})  # rank 0 gathers all, the others get nothing
        tensors, counts = {}, {}
        for name, entries in state.items():
            for key, value in entries.items():
                if value.ndim == 0:
                    counts[f"{name}/{key}"] = float(value)
                else:
                    tensors[f"{name}/{key}"] = value.clone().contiguous()
        return tensors, counts

    def load_optimizer_state(
        self, tensors: Mapping[str, Tensor], counts: Mapping[str, float]
    ) -> None:
        """Restore what `optimizer_state` gave, on any number of ranks. Empty counts: no state."""
        if not counts:
            return
        state: dict[str, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, moment = key.rpartition("/")
            state.setdefault(name, {})[moment] = tensor
        for key, count in counts.items():
            name, _, moment = key.rpartition("/")
            state.setdefault(name, {})[moment] = torch.tensor(count)
        names = [name for name, p in self._model.named_parameters() if p.requires_grad]
        if sorted(state) != sorted(names):
            raise CheckpointError(
                f"optimizer: {len(state)} parameters in the checkpoint, {len(names)} in the model"
            )
        group = {k: v for k, v in self._optimizer.param_groups[0].items() if k != "params"}
        set_optimizer_state_dict(
            self._model,
            self._optimizer,
            {"state": state, "param_groups": [{**group, "params": names}]},
            options=StateDictOptions(full_state_dict=True),
        )

    def _encode(
        self, micro_batches: Sequence[MicroBatch], frames: Mapping[str, np.ndarray]
    ) -> None:
        wanted = dict.fromkeys(
            name for batch in micro_batches for s in batch.samples for name in s.frames
        )
        missing = [name for name in wanted if name not in self._features]
        if missing:
            self._features.update(
                encode_frames(self._model, self._vision, frames, missing, self._device)
            )

    def _input(self, batch: MicroBatch):
        return forward_input(
            batch.samples,
            self._features,
            self._vision.tokens.image_pad,
            self._device,
            self._num_deepstack,
            packed=self._spec.packing,
        )

    @torch.no_grad()
    def _logprobs(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        return [self._model(self._input(batch))[0] for batch in micro_batches]

    def _reference(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        with reference_policy(self._model, self._spec.adapter is not None):
            return self._logprobs(micro_batches)

    def _backward(
        self,
        mini: MiniBatch,
        batch: MicroBatch,
        old: Tensor | None,
        reference: Tensor | None,
        whole: tuple[np.ndarray, np.ndarray] | None,
        mismatch: MismatchSums | None,
    ) -> dict[str, float]:
        logprobs, entropies = self._model(self._input(batch))
        if mismatch is not None:
            _measure(mismatch, batch, logprobs)
        episode = _episodes(batch)

        def at_tokens(values: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(values)[episode].to(self._device, dtype)

        out = policy_loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=logprobs.detach() if old is None else old,
                behavior_logprobs=_tokens(batch, "behavior_logprobs").to(self._device),
                advantages=at_tokens(mini.advantages, torch.float32),
                token_weight=at_tokens(mini.sequence_weight, torch.float32),
                sequence_index=episode.to(self._device),
                global_denominator=mini.global_denominator,
                reference_logprobs=reference,
                entropies=entropies,
                sequence_length=at_tokens(mini.sequence_length, torch.int64),
                sequence_log_ratio=at_tokens(whole[0], torch.float32) if whole else None,
                sequence_mismatch=at_tokens(whole[1], torch.float32) if whole else None,
            ),
            self._loss,
        )
        # FSDP averages gradients over ranks; the loss is a sum over them.
        (out.loss * self._world).backward()
        return {name: float(value) for name, value in out.sums.items()}

    def _episode_sums(
        self, mini: MiniBatch, old: list[Tensor] | None, is_first: bool
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean of log(new / old) and sum of log(old / engine) over each whole episode.

        The windows of an episode may lie in several micro-batches and on several ranks, so the sums
        are made before the backward passes, over all of them. None where no loss term needs them.
        """
        if not self._loss.is_sequence_level or old is None:
            return None
        new = old if is_first else self._logprobs(mini.micro_batches)
        sums = torch.zeros(2, len(mini.sequence_length), dtype=torch.float64)
        for batch, now, before in zip(mini.micro_batches, new, old, strict=True):
            engine = _tokens(batch, "behavior_logprobs").double()
            sums[0].index_add_(0, _episodes(batch), (now - before).double().cpu())
            sums[1].index_add_(0, _episodes(batch), before.double().cpu() - engine)
        sums = sums.to(self._device)
        dist.all_reduce(sums)
        log_ratio, mismatch = sums.cpu().numpy()
        return log_ratio / np.maximum(mini.sequence_length, 1), mismatch

    def _check_mismatch(self, mismatch: MismatchSums) -> None:
        # Gloo's MAX loses a NaN that is not rank 0's; infinity survives it and stops the run too.
        worst = mismatch.maximum.max().nan_to_num(math.inf, math.inf).to(self._device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if not float(worst) <= self._mismatch_stop:
            raise MismatchError(
                f"log-probabilities of engine and trainer differ by {float(worst):.3g}, more than "
                f"algorithm.mismatch.stop={self._mismatch_stop}. Nothing was trained in this step. "
                "Usual causes: another model or adapter in the engine, another temperature, "
                "another image processor, or a lower precision than the threshold allows for."
            )

    def _clip(self) -> float:
        limit = self._optimizer_spec.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, limit)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def shard(model: PolicyModel, device: str) -> PolicyModel:
    """FSDP2 over all ranks: each decoder layer a unit, the rest one more, the tower left whole."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    model.to(device)
    options: dict = {"mesh": mesh}
    if device == "cuda":
        # Adapters are float32 at rest and bfloat16 in the matmuls; gradients add up in float32.
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=next(model.qwen.parameters()).dtype, reduce_dtype=torch.float32
        )
    for layer in model.qwen.model.language_model.layers:
        fully_shard(layer, **options)
    tower = set(model.qwen.model.visual.parameters())
    return fully_shard(model, ignored_params=tower, **options)


def _parameter_name(key: str) -> str:
    """PEFT's file key to the name of the live parameter."""
    return f"wrapped.{key}".replace(".lora_A.", ".lora_A.default.").replace(
        ".lora_B.", ".lora_B.default."
    )


def _tokens(batch: MicroBatch, field: str) -> Tensor:
    """A per-position array of the samples, at their loss tokens, [N]."""
    parts = [getattr(sample, field)[sample.loss_mask] for sample in batch.samples]
    return torch.from_numpy(np.concatenate(parts)) if parts else torch.zeros(0)


def _episodes(batch: MicroBatch) -> Tensor:
    """The episode of each loss token, [N]."""
    parts = [np.full(sample.num_loss_tokens, sample.episode) for sample in batch.samples]
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))


def _measure(mismatch: MismatchSums, batch: MicroBatch, logprobs: Tensor) -> None:
    mismatch.add(
        logprobs,
        _tokens(batch, "behavior_logprobs"),
        _tokens(batch, "after_image"),
        _tokens(batch, "turn_index"),
    )
