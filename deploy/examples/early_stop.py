"""A script with its own evaluation, and an early stop in all regions after the same step.

`pipeline.evaluate` reports the loss. Any other figure is the script's own business: here the
accuracy, counted by the loss function, and so known in the last region alone, where the outputs
are. That region decides; `pipeline.request_stop` then ends the loop of every region after the same
step, and `pipeline.stop_reason` says why in all of them.

The model has but a little text to learn, so it soon knows that by heart and gets no better on text
it has not seen: the accuracy stops rising, and so does the run.

    python deploy/examples/early_stop.py --steps 400 --patience 3
    geotrain run --config site.toml -- python deploy/examples/early_stop.py --steps 400

`layers` counts 8 modules: "0:4" and "4:8" for two regions.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

import geotrain

CONTEXT = 8
VOCABULARY = 256
BATCH = 32
"""At most run.global_batch of the config."""
TRAINING_BYTES = 1_500
HELD_OUT_BYTES = 4_000

Batch = tuple[torch.Tensor, torch.Tensor]


def build_model(width: int = 32) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, width),
        nn.Flatten(),
        nn.Linear(CONTEXT * width, 8 * width),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(8 * width, 8 * width),
        nn.ReLU(),
        nn.Linear(8 * width, VOCABULARY),
    )


def library_text() -> torch.Tensor:
    """A little of the source of Python's standard library: text that every machine has."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[: TRAINING_BYTES + HELD_OUT_BYTES], dtype=torch.uint8)


def samples_at(text: torch.Tensor, starts: torch.Tensor) -> Batch:
    window = text[starts.unsqueeze(1) + torch.arange(CONTEXT + 1)].long()
    return window[:, :-1], window[:, -1]


def random_batches(text: torch.Tensor) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(0, text.numel() - CONTEXT, (BATCH,), generator=generator)
        yield samples_at(text, starts)


def all_batches(text: torch.Tensor) -> Iterator[Batch]:
    """Every eighth position, once and in order; these may be larger than a training batch."""
    for starts in torch.arange(0, text.numel() - CONTEXT, 8).split(256):
        yield samples_at(text, starts)


class Score:
    """The loss function; while the segment evaluates it also counts what was right."""

    def __init__(self, segment: nn.Module) -> None:
        self._segment = segment
        self._right = self._seen = 0

    def loss(self, logits_BV: torch.Tensor, targets_B: torch.Tensor) -> torch.Tensor:
        if not self._segment.training:
            self._right += int((logits_BV.argmax(dim=1) == targets_B).sum())
            self._seen += targets_B.numel()
        return functional.cross_entropy(logits_BV, targets_B)

    def take(self) -> float:
        """The accuracy since the last call."""
        accuracy = self._right / max(1, self._seen)
        self._right = self._seen = 0
        return accuracy


class Patience:
    """Says when a figure has not risen for `limit` evaluations."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._best = 0.0
        self._without = 0

    def is_over(self, accuracy: float) -> bool:
        self._without = 0 if accuracy > self._best else self._without + 1
        self._best = max(self._best, accuracy)
        return self._without >= self._limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="never more than these")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--patience", type=int, default=3, help="evaluations without a gain")
    options = parser.parse_args()

    region = geotrain.attach()
    segment = region.segment(build_model)
    region.init_weights(segment)
    score = Score(segment)
    pipeline = region.pipeline(
        segment, torch.optim.AdamW(segment.parameters(), lr=3e-3), loss_fn=score.loss
    )
    is_last = region.index == region.num_regions - 1
    patience = Patience(options.patience)

    loader = held_out = None
    if region.reads_data:
        text = library_text()
        loader, held_out = random_batches(text[:TRAINING_BYTES]), text[TRAINING_BYTES:]

    last_step = 0
    for result in pipeline.fit(loader, steps=options.steps):
        last_step = result.step
        if result.step % options.every:
            continue
        report = pipeline.evaluate(all_batches(held_out) if held_out is not None else None)
        if is_last:
            accuracy = score.take()
            print(
                f"step {result.step} loss {result.loss:.4f} "
                f"held-out loss {report.loss:.4f} accuracy {accuracy:.4f}",
                flush=True,
            )
            if patience.is_over(accuracy):
                # It takes effect in every region at the end of the step that comes next.
                pipeline.request_stop(f"no gain in {options.patience} evaluations")
    why = pipeline.stop_reason or "all steps done"
    print(f"region {region.name} ended after step {last_step}: {why}", flush=True)


if __name__ == "__main__":
    main()
