"""Where the directories of a configuration lie, and whether they can serve.

A relative path is looked up from the working directory, then from the repository root, so that the
shipped start is found from anywhere. Paths in the configuration stay as they were given: a resolved
one would change from node to node and make the same run look like another.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from wayfinder.config.schema import Config, Device
from wayfinder.config.violation import Violation

REPOSITORY = Path(__file__).resolve().parents[3]
_READS_HIDDEN = re.compile(r"\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.lora_A\.")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def locate(path: str) -> Path:
    """The absolute path that a relative or absolute path of the configuration names."""
    given = Path(path).expanduser()
    if given.is_absolute() or given.exists():
        return given.absolute()
    in_repository = REPOSITORY / given
    return in_repository if in_repository.exists() else given.absolute()


def is_hub_id(path: str) -> bool:
    """Whether `path` names a model of a hub rather than a directory.

    `org/name` is one unless something of that name, or a directory `org`, lies here.
    """
    first = path.partition("/")[0]
    return (
        _HUB_ID.fullmatch(path) is not None
        and not locate(path).exists()
        and not locate(first).exists()
    )


def model_source(path: str) -> str:
    """`model.path` as loaders take it: a hub id as it is, else an absolute directory."""
    return path if is_hub_id(path) else str(locate(path))


def model_directory_is_complete(config: Config) -> Iterator[Violation]:
    path = config.model.path
    if is_hub_id(path):
        return
    directory = locate(path)
    key = "model.path"
    if not directory.is_dir():
        # The runs of a preparation lie below its name.
        made_by = next((part for part in directory.parts if part.endswith("_sft")), None)
        root = path.partition(f"/{made_by}/")[0]
        where = "" if root == "outputs" else f" paths.root={root}"
        make = f", or make it: `python run.py +experiment={made_by}{where}`" if made_by else ""
        yield Violation(
            key,
            "a model directory, or a hub id such as org/name",
            path,
            f"There is no directory {directory}: set model.path=<directory>{make}",
        )
        return
    for file in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        if file.is_file() and (problem := _why_not_readable(file)):
            yield Violation(
                key,
                "a directory with readable files",
                path,
                f"{file}: {problem}. Copy it again, or set model.path to another directory",
            )
    for what, patterns in (
        ("config.json", ("config.json",)),
        ("weights (*.safetensors)", ("*.safetensors",)),
        ("a tokenizer (tokenizer.json)", ("tokenizer.json", "vocab.json")),
        (
            "an image processor (preprocessor_config.json)",
            ("preprocessor_config.json", "processor_config.json"),
        ),
    ):
        if not any(any(directory.glob(pattern)) for pattern in patterns):
            yield Violation(
                key,
                f"a directory that holds {what}",
                path,
                f"{directory} lacks it: set model.path to a complete Hugging Face model directory",
            )


def context_fits_the_model(config: Config) -> Iterator[Violation]:
    longest = _text_config(config).get("max_position_embeddings")
    if isinstance(longest, int) and config.rollout.max_model_len > longest:
        yield Violation(
            "rollout.max_model_len",
            f"at most {longest}, the positions of the model at {config.model.path}",
            config.rollout.max_model_len,
            f"Set rollout.max_model_len={longest}",
        )


def starting_adapter_fits_the_lora_settings(config: Config) -> Iterator[Violation]:
    path, lora = config.model.adapter, config.model.lora
    if path is None:
        return
    key = "model.adapter"
    file = locate(path) / "adapter_config.json"
    try:
        saved = json.loads(file.read_text())
        if not isinstance(saved, dict):
            raise ValueError(f"an object was expected, found {type(saved).__name__}")
    except (OSError, ValueError) as error:
        yield Violation(
            key,
            "a directory with a readable adapter_config.json",
            path,
            f"{file}: {error}. Set model.adapter=<directory of a LoRA adapter>, or null",
        )
        return
    weights = file.parent / "adapter_model.safetensors"
    otherwise = "set model.adapter=<directory of a LoRA adapter>, or null"
    if not weights.is_file():
        yield Violation(
            key,
            "a directory with adapter_model.safetensors",
            path,
            f"{file.parent} lacks it: {otherwise}",
        )
    elif problem := _why_not_readable(weights):
        yield Violation(
            key, "a readable adapter_model.safetensors", path, f"{weights}: {problem}: {otherwise}"
        )
    else:
        yield from _other_models_adapter(config, weights)
    targets = saved.get("target_modules")
    if not isinstance(targets, list):
        yield Violation(
            key,
            "an adapter whose target_modules are a list of layers",
            path,
            f"{file}: {targets!r} found: {otherwise}",
        )
        return
    targets = sorted({str(name).rpartition(".")[2] for name in targets})
    pairs = (
        ("rank", "r", lora.rank, saved.get("r")),
        ("alpha", "lora_alpha", lora.alpha, saved.get("lora_alpha")),
        ("rslora", "use_rslora", lora.rslora, bool(saved.get("use_rslora", False))),
        ("targets", "target_modules", sorted(set(lora.targets)), targets),
    )
    for name, saved_name, wanted, found in pairs:
        if wanted != found:
            value = f"[{','.join(found)}]" if isinstance(found, list) else found
            yield Violation(
                f"model.lora.{name}",
                f"{value}, the {saved_name} of the adapter at {path}",
                wanted,
                f"Set model.lora.{name}={value}, or model.adapter=null to start a new adapter",
            )
    extras = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")
    for name in (extra for extra in extras if saved.get(extra)):
        yield Violation(
            key,
            f"an adapter without {name}",
            path,
            "The engine and the trainer would apply it differently: use a plain LoRA adapter",
        )


def _other_models_adapter(config: Config, weights: Path) -> Iterator[Violation]:
    """Matrices that read the hidden state tell for which width the adapter was made."""
    width = _text_config(config).get("hidden_size")
    with safe_open(weights, "np") as file:
        for name in file.keys():  # noqa: SIM118
            if not (_READS_HIDDEN.search(name) and isinstance(width, int)):
                continue
            found = file.get_slice(name).get_shape()[-1]
            if found != width:
                yield Violation(
                    "model.adapter",
                    f"an adapter of the model at {config.model.path}, whose hidden size is {width}",
                    config.model.adapter,
                    f"{name} is for {found}: set model.path to its model, or model.adapter=null",
                )
                return


def _text_config(config: Config) -> dict[str, Any]:
    """What config.json of a model directory says of the text model; {} where there is none."""
    try:
        whole = json.loads((locate(config.model.path) / "config.json").read_text())
        text = whole.get("text_config", whole)
        return text if isinstance(text, dict) else {}
    except (OSError, ValueError, AttributeError):
        return {}


def _why_not_readable(file: Path) -> str | None:
    try:
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            with safe_open(file, "np"):
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return str(error)
    return None


def directories_can_be_written(config: Config) -> Iterator[Violation]:
    for key, path in (("paths.root", config.paths.root), ("sync.dir", config.sync.dir)):
        if path is None:
            continue
        if not path.strip():
            yield Violation(key, "a directory", "", f"Set {key}=<directory>")
            continue
        problem = _why_not_writable(Path(path).expanduser().absolute())
        if problem:
            yield Violation(
                key,
                "a directory that exists or can be made, and written into",
                path,
                f"{problem}: set {key}=<a writable directory>",
            )


def reported_directory(config: Config) -> Path:
    """Where `task=report` looks for runs."""
    return Path(config.paths.root if config.root is None else config.root).expanduser().absolute()


def the_reported_directory_is_there(config: Config) -> Iterator[Violation]:
    directory = reported_directory(config)
    key, given = ("paths.root", config.paths.root) if config.root is None else ("root", config.root)
    if not given.strip():
        yield Violation(key, "a directory with runs below it", given, f"Set {key}=<directory>")
    elif not directory.is_dir():
        yield Violation(
            key,
            "a directory with runs below it",
            given,
            f"There is no directory {directory}: set root=<directory>",
        )
    elif problem := _why_not_writable(directory):
        yield Violation(
            key, "a directory that can be written into", given, f"{problem}: make it writable"
        )


def a_gpu_is_here_when_one_is_asked_for(config: Config) -> Iterator[Violation]:
    # With an address the GPUs are on other machines; Ray knows them, we do not.
    if config.cluster.device is not Device.cuda or config.cluster.address is not None:
        return
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        yield Violation(
            "cluster.device",
            "cpu, because this machine shows no GPU",
            str(config.cluster.device),
            "Set cluster=laptop, or cluster.address=auto to join a cluster that has GPUs",
        )


def _why_not_writable(directory: Path) -> str | None:
    """Try to write at the nearest existing ancestor; leaves nothing behind."""
    ancestor = directory
    while not ancestor.exists() and ancestor != ancestor.parent:
        ancestor = ancestor.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".wayfinder-probe-", dir=ancestor):
            return None
    except OSError as error:
        return f"{ancestor} cannot be written ({error.strerror})"
