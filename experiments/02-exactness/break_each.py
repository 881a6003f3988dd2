"""Breaks each guarded line once, in a copy of the tree, and sees whether its test fails.

    python experiments/02-exactness/break_each.py            # all, about 20 minutes on two cores
    python experiments/02-exactness/break_each.py kl token   # those whose area or claim has a word

Writes `broken.json` beside itself: for each break whether the tests passed before it and failed
with it. A check that still passes is not a check; then the exit code is 1.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
COPIED = ("src", "tests", "conf", "run.py", "pyproject.toml", "experiments/00-tiny-start")


@dataclass(frozen=True)
class Break:
    """One line made wrong: `old` becomes `new` in `file`, and `tests` must fail."""

    area: str
    claim: str
    file: str
    old: str
    new: str
    tests: str


UNIT, INTEGRATION = "tests/unit", "tests/integration"
BREAKS = [
    Break(
        "tokens",
        "a context extends the one before and its reply",
        "chat/render.py",
        "        ids += turn.reply_ids\n",
        "        ids += turn.reply_ids[:-1]\n",
        f"{UNIT}/test_render.py -k extends_the_one_before",
    ),
    Break(
        "tokens",
        "a cut reply is closed as the template closes it",
        "chat/render.py",
        "return () if reply_ids and reply_ids[-1] == self.end_of_turn else (self.end_of_turn,)",
        "return ()",
        f"{UNIT}/test_render.py -k closed",
    ),
    Break(
        "tokens",
        "the engine's prompt is compared with ours",
        "rollout/vllm_engine.py",
        "        if found == request.prompt_ids:\n            return\n",
        "        return\n",
        f"{INTEGRATION}/test_engine.py -k reads_differently",
    ),
    Break(
        "tokens",
        "no vision token is sampled",
        "rollout/vllm_engine.py",
        "logit_bias=dict.fromkeys(self._spec.banned_ids, BANNED_BIAS),",
        "logit_bias=None,",
        f"{INTEGRATION}/test_engine.py -k logprobs_agree",
    ),
    Break(
        "tokens",
        "each sampled token is trained once",
        "batch/samples.py",
        "        if number < trained[0]:\n",
        "        if False:\n",
        f"{UNIT}/test_samples.py -k trained_once",
    ),
    Break(
        "mrope",
        "text after an image starts behind its larger side",
        "batch/positions.py",
        "position += max(height, width)",
        "position += height * width",
        f"{UNIT}/test_positions.py -k own_positions",
    ),
    Break(
        "images",
        "a sample's frames are those that the model saw, in order",
        "batch/samples.py",
        "        frames.extend(turn.frames)\n",
        "        frames[:0] = turn.frames\n",
        f"{UNIT}/test_samples.py",
    ),
    Break(
        "images",
        "features reach the pads of their own image",
        "train/model.py",
        "embeds=torch.cat([feature.embeds for feature in shown]) if shown else empty,",
        "embeds=torch.cat([feature.embeds for feature in shown[::-1]]) if shown else empty,",
        f"{INTEGRATION}/test_policy_rank.py -k together",
    ),
    Break(
        "logprobs",
        "the temperature divides logits",
        "train/logprobs.py",
        "torch.log_softmax(logits / temperature, dim=-1)",
        "torch.log_softmax(logits, dim=-1) / temperature",
        f"{UNIT}/test_logprobs.py -k temperature",
    ),
    Break(
        "logprobs",
        "the log-prob of a token is read one position earlier",
        "train/model.py",
        "read_position=position - 1,",
        "read_position=position,",
        f"{INTEGRATION}/test_engine.py -k logprobs_agree",
    ),
    Break(
        "logprobs",
        "engine and trainer ban the same tokens",
        "train/logprobs.py",
        "        logits = logits + bias\n",
        "        logits = logits + 0 * bias\n",
        f"{UNIT}/test_logprobs.py -k banned",
    ),
    Break(
        "logprobs",
        "a NaN mismatch is not hidden",
        "train/step.py",
        ".nan_to_num(math.inf, math.inf)",
        ".nan_to_num(0.0)",
        f"{INTEGRATION}/test_policy_rank.py -k mismatch",
    ),
    Break(
        "advantage",
        "the deviation is the sample deviation",
        "algo/advantage.py",
        "math.sqrt(len(centered) - 1)",
        "math.sqrt(len(centered))",
        f"{UNIT}/test_advantage.py",
    ),
    Break(
        "advantage",
        "equal rewards give exactly zero",
        "algo/advantage.py",
        "    if rewards_equal(rewards):\n        return [0.0] * len(rewards)\n",
        "",
        f"{UNIT}/test_advantage.py",
    ),
    Break(
        "advantage",
        "what the system failed has no part in a group",
        "types.py",
        "tuple(e for e in self.episodes if not e.outcome.is_failure)",
        "self.episodes",
        f"{UNIT}/test_plan.py",
    ),
    Break(
        "kl",
        "k3's value has k2's gradient",
        "algo/kl.py",
        "return _k3(difference).detach() + (k2 - k2.detach())",
        "return _k3(difference)",
        f"{UNIT}/test_kl.py",
    ),
    Break(
        "kl",
        "the reference is the start adapter, not no adapter",
        "train/step.py",
        "reference_policy(self._model, self._spec.adapter is not None)",
        "reference_policy(self._model, False)",
        f"{INTEGRATION}/test_policy_rank.py -k start_from_an_adapter",
    ),
    Break(
        "loss-reduction",
        "one denominator for all micro-batches",
        "algo/reduce.py",
        "return (values * token_weight).sum() / global_denominator",
        "return (values * token_weight).sum() / max(1, len(values))",
        f"{UNIT}/test_loss.py -k any_split",
    ),
    Break(
        "loss-reduction",
        "FSDP's mean over ranks becomes a sum",
        "train/step.py",
        "(out.loss * self._world).backward()",
        "out.loss.backward()",
        f"{INTEGRATION}/test_policy_rank.py -k three",
    ),
    Break(
        "loss-reduction",
        "dropped groups keep their tokens in the denominator",
        "batch/plan.py",
        "int(g) in chosen or spec.drop_is_exact",
        "int(g) in chosen",
        f"{UNIT}/test_plan.py -k denominators",
    ),
    Break(
        "loss-reduction",
        "an update without signal moves nothing",
        "train/step.py",
        "            if norm > 0:\n",
        "            if True:\n",
        f"{INTEGRATION}/test_policy_rank.py -k without_signal",
    ),
    Break(
        "packing",
        "samples of one row do not see each other",
        "train/model.py",
        "all_positions = np.concatenate([places, positions]) if packed else positions",
        "all_positions = positions",
        f"{INTEGRATION}/test_policy_rank.py -k changes_nothing",
    ),
    Break(
        "lora-sync",
        "a file that was changed after publication is found",
        "runtime/adapter_sync.py",
        '        if found != _entry(expected, path, "sha256"):\n',
        "        if False:\n",
        f"{UNIT}/test_adapter_sync.py",
    ),
    Break(
        "lora-sync",
        "a new adapter does not answer from the old one's cache",
        "rollout/vllm_engine.py",
        'LoRARequest(f"policy-{version}", version + 1, str(path))',
        'LoRARequest("policy", 1, str(path))',
        f"{INTEGRATION}/test_engine.py -k old_ones_cache",
    ),
    Break(
        "lora-sync",
        "rank 0's factor reaches the engine with its scale",
        "rollout/vllm_cpu.py",
        "low = scale * linear(",
        "low = 2 * scale * linear(",
        f"{INTEGRATION}/test_vllm_parts.py",
    ),
    Break(
        "env",
        "every turn counts, also one without a legal move",
        "rollout/episode.py",
        "        if turn >= self._spec.max_turns:\n",
        "        if sum(t.executed for t in self._turns) >= self._spec.max_turns:\n",
        f"{UNIT}/test_episode.py",
    ),
    Break(
        "env",
        "no evaluation maze is trained on",
        "envs/tasks.py",
        "            if task_key(task) not in self.forbidden:\n",
        "            if True:\n",
        f"{UNIT}/test_tasks.py",
    ),
    Break(
        "env",
        "form is no success",
        "types.py",
        "return self.outcome is Outcome.SOLVED",
        "return self.reward > 0",
        f"{UNIT}/test_episode.py -k form",
    ),
    Break(
        "statistics",
        "pass@k is unbiased",
        "statistics.py",
        "1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)",
        "1.0 - (1 - num_solved / num_samples) ** k",
        f"{UNIT}/test_statistics.py",
    ),
]


def main(words: list[str]) -> int:
    chosen = [b for b in BREAKS if not words or any(w in f"{b.area} {b.claim}" for w in words)]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in COPIED:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        sound: dict[str, bool] = {}
        for item in chosen:
            path = tree / "src/wayfinder" / item.file
            text = path.read_text()
            if text.count(item.old) != 1:
                raise SystemExit(
                    f"{item.file}: {text.count(item.old)} times {item.old!r}, not once"
                )
            if item.tests not in sound:
                sound[item.tests] = passes(tree, item.tests)
            path.write_text(text.replace(item.old, item.new))
            began = time.monotonic()
            caught = not passes(tree, item.tests)
            path.write_text(text)
            row = {"sound": sound[item.tests], "caught": caught, **asdict(item)}
            rows.append(row | {"seconds": round(time.monotonic() - began, 1)})
            print("caught" if caught else "MISSED", item.area, "|", item.claim, flush=True)
    if not words:
        (HERE / "broken.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["sound"] and row["caught"] for row in rows) else 1


def passes(tree: Path, tests: str) -> bool:
    files, _, wanted = tests.partition(" -k ")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", files]
    done = subprocess.run(
        command + (["-k", wanted] if wanted else []),
        cwd=tree,
        env=os.environ
        | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode not in (0, 1):
        raise SystemExit(
            f"{tests}: pytest could not run\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
