"""What a weight version costs as a delta, as adapters and in full: bytes, and seconds to publish and to fetch.

python -m tests.benchmarks.snapshots [--model DIR] [--steps 1] [--out bench.jsonl]

A policy takes real AdamW steps in float32, on tokens drawn at random, and is published in the precision given. Three
kinds of change: `sft` (learning rate 2e-5) and `rl` (1e-6) move all weights, `lora` (1e-4) adapters of rank 8 on all
projections. The reader holds the version before. The store is a local folder, so seconds are those of the processor and
the disk; over a network the bytes count. Without --model the policies are one of the demo's size, and SmolLM2-135M in
bfloat16 (`make smollm2`), which takes two minutes and 3.3 GB of memory.
"""

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from infra.weight_adapters import UP
from infra.weight_delta import diff
from infra.weights import Adapters, WeightStore, describe, fingerprint_file
from schemas.messages import Manifest
from schemas.settings import Learner
from tests.benchmarks.lines import keep
from tests.policies import smollm2, write_policy
from trainers.lora import adapt, merged, write_adapters
from trainers.policy import export, load_policy

WAYS = ("full", "delta", "adapters")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
RATES = {"rl": 1e-6, "rl-10x": 1e-5, "sft": 2e-5}
ADAPTERS_RATE, LENGTH = 1e-4, 64
LEARNER = Learner(lora_rank=8)
SCALE = LEARNER.lora_alpha / LEARNER.lora_rank


def train(model: PreTrainedModel, rate: float, steps: int) -> None:
    """AdamW steps on sequences of random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.999), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        ids = torch.randint(0, model.config.vocab_size, (2, LENGTH), generator=generator)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def train_adapters(model: PreTrainedModel, steps: int) -> None:
    """The same of adapters alone."""
    torch.manual_seed(0)
    adapt(model, LEARNER)
    train(model, ADAPTERS_RATE, steps)


def measure(
    source: Path, dtype: torch.dtype, change: Callable[[PreTrainedModel], None], root: Path
) -> dict[str, float]:
    """Figures of one change of the policy in `source`, published in `dtype`."""
    model = load_policy(source)
    old, new = (root / name for name in ("old", "new"))
    for folder in (old, new):
        if folder == new:
            change(model)
        tensors = _cast(model.state_dict(), dtype)
        export(model, merged(tensors, SCALE), source, folder)
    write_adapters(tensors, SCALE, file := root / "model.adapters.safetensors")
    has_adapters = any(name.endswith(UP) for name in tensors)
    del model, tensors
    figures = {"unchanged": _unchanged(old / "model.safetensors", new / "model.safetensors")}
    made, began = root / "m.delta.safetensors", time.perf_counter()
    assert diff(old / "model.safetensors", new / "model.safetensors", made, 2**62)
    figures |= {"diff_s": time.perf_counter() - began, "delta_bytes": made.stat().st_size}
    figures["full_bytes"] = (new / "model.safetensors").stat().st_size
    for way in WAYS if has_adapters else WAYS[:2]:
        before, adapters = (old if way == "delta" else None), (file if way == "adapters" else None)
        figures |= {f"{way}_{name}": value for name, value in _travel(root / way, old, new, before, adapters).items()}
    return figures


def _travel(root: Path, old: Path, new: Path, before: Path | None, adapters: Path | None) -> dict[str, float]:
    """Seconds to publish `new`, and to fetch it where `old` is; bytes that moved."""
    store = WeightStore(str(root / "store"))
    store.publish(old, _manifest(old, 1))
    store.fetch(1, root / "cache")
    manifest, base = _manifest(new, 2), store.manifest(1)
    times = [time.perf_counter()]
    store.publish(new, manifest, before, Adapters(adapters, old, base) if adapters else None)
    times.append(time.perf_counter())
    folder = store.fetch(2, root / "cache")
    times.append(time.perf_counter())
    assert (folder / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    return {
        "publish_s": times[1] - times[0],
        "fetch_s": times[2] - times[1],
        "moved_bytes": store.manifest(2).num_bytes,
    }


def _manifest(folder: Path, version: int) -> Manifest:
    return Manifest(
        version=version,
        parent=version - 1 or None,
        files=describe(folder),
        fingerprint=fingerprint_file(folder / "model.safetensors"),
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def _cast(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) for name, tensor in tensors.items()}


def _unchanged(old: Path, new: Path) -> float:
    """Share of values with equal bits."""
    before, after = load_file(old), load_file(new)
    equal = sum(int((before[name] == after[name]).sum()) for name in before)
    return equal / sum(tensor.numel() for tensor in before.values())


def policies(scratch: Path) -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Folder and precisions of each policy that is measured by default.

    Raises:
        SettingsError: SmolLM2 is not installed.
    """
    tiny = write_policy(scratch / "policy", hidden=128, layers=4, mlp=384)
    return {"tiny": (tiny, ("bf16", "fp32")), "SmolLM2-135M": (smollm2(), ("bf16",))}


def report(name: str, kind: str, precision: str, found: Mapping[str, float], out: Path | None) -> None:
    """A line of the table, and one of `out`."""
    ways = [way for way in WAYS if f"{way}_fetch_s" in found]
    times = ["/".join(f"{found[f'{way}_{step}_s']:.2f}" for way in ways) for step in ("publish", "fetch")]
    ratio, adapters = found["delta_bytes"] / found["full_bytes"], found.get("adapters_moved_bytes")
    small = f"{adapters / found['full_bytes']:8.4f}" if adapters else f"{'':8}"
    shown = f"{found['unchanged']:10.4f} {ratio:11.4f} {small} {found['full_bytes'] / 1e6:9.2f}"
    print(f"{name:13} {kind:8} {precision:9} {shown} {found['diff_s']:7.2f}  {times[0]:16} {times[1]}", flush=True)
    line = {"name": f"snapshots {name} {kind} {precision}", "value": found["delta_bytes"], "unit": "bytes"}
    keep(out, {**line, "reference": found["full_bytes"], "ratio": round(ratio, 4), **found})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    changes = {kind: partial(train, rate=rate, steps=options.steps) for kind, rate in RATES.items()}
    changes["lora"] = partial(train_adapters, steps=options.steps)
    with tempfile.TemporaryDirectory() as scratch:
        chosen = {"given": (options.model, ("bf16",))} if options.model else policies(Path(scratch))
        columns = "unchanged  delta/full adapters   full MB  diff s  publish s        fetch s: full/delta/adapters"
        print(f"policy        change   precision  {columns}")
        for name, (source, precisions) in chosen.items():
            for kind, change in changes.items():
                for precision in precisions:
                    found = measure(source, DTYPES[precision], change, root := Path(scratch) / "case")
                    shutil.rmtree(root)
                    report(name, kind, precision, found, options.out)


if __name__ == "__main__":
    main()
