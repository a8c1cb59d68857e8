"""attach() and Region: a training process's place in the run."""

import atexit
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from geotrain.config import Config, load_config
from geotrain.errors import ConfigError
from geotrain.membership import Membership
from geotrain.observability.log import setup_logging
from geotrain.pipeline import segment as segments
from geotrain.pipeline import weights
from geotrain.pipeline.checks import check_loss, check_training
from geotrain.pipeline.context import Context, Parts, Place
from geotrain.pipeline.device import PRECISIONS, choose_device
from geotrain.pipeline.edge import Edge, Neighbour
from geotrain.pipeline.group import Group
from geotrain.pipeline.inputs import Inputs
from geotrain.pipeline.line import Line
from geotrain.pipeline.microbatch import count_targets
from geotrain.pipeline.parcel import Codecs
from geotrain.pipeline.runtime import Runtime
from geotrain.pipeline.segment import SegmentInfo, Split
from geotrain.pipeline.stage import LossFn, LossSpec, Stage
from geotrain.pipeline.step import CommitHook, Pipeline
from geotrain.pipeline.worker import Worker
from geotrain.transport.messages import BACKWARD, FORWARD

logger = logging.getLogger(__name__)

ATTACH_TIMEOUT_S = 60.0
SOLO_NAME = "solo"

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None
SplitLike = Split | Callable[[nn.Module, "Region"], nn.Module] | None


def attach(config: str | Path | None = None, *, timeout_s: float = ATTACH_TIMEOUT_S) -> "Region":
    """Join the run that a site's config file describes.

    Args:
        config: The file; by default the environment's GEOTRAIN_CONFIG. With neither, the script
            trains alone in this process, without any daemon.
        timeout_s: How long to wait for this region's daemon.

    Raises:
        ConfigError: The file or the environment cannot work.
        AttachError: The daemon cannot be reached, or refused.
        RegionError: A neighbouring region has refused this one already: the runs differ.
    """
    path = config if config is not None else os.environ.get("GEOTRAIN_CONFIG")
    if path is None:
        return Region(None, None)
    loaded = load_config(path)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != 1:
        raise ConfigError(
            f"region {loaded.site.name} was started with {world_size} ranks (WORLD_SIZE); this "
            f"release runs one rank in each region: use torchrun --nproc-per-node=1"
        )
    setup_logging()
    torch.set_num_threads(loaded.run.threads)
    if loaded.run.num_regions == 1:
        return Region(loaded, None)
    membership = Membership.join(loaded, timeout_s=timeout_s)
    region = Region(loaded, membership)
    # Registered after the attachment's own handler, so it runs before: what others still wait for
    # must be taken before they hear that this process has left.
    atexit.register(region.close)
    return region


class Region:
    """This process's place: which region, which rank, and the parts of the model it owns.

    Attributes:
        name, index, num_regions: This region in the line.
        solo: Whether the whole run is this one process.
        rank, world_size: Of this process inside its region.
        is_main: True once in the run. is_region_main: true once in each region.
        reads_data: Whether this process is to be given batches; data_rank and data_world say which
            share of them.
    """

    def __init__(self, config: Config | None, membership: Membership | None) -> None:
        self._config = config
        self._membership = membership
        self._hooks: list[CommitHook] = []
        self._pipeline: tuple[Stage, Context] | None = None
        self._mesh: DeviceMesh | None = None
        # One end of each boundary and one count of turns for as long as the process is attached:
        # the neighbour's next pipeline may begin to send while ours is still the last one.
        self._edges: dict[int, Edge] = {}
        self._line: Line | None = None
        self._packer = Worker("geotrain-packer")
        self._unpacker = Worker("geotrain-unpacker")
        self.device = choose_device()
        self.region_names = (
            [region.name for region in config.run.regions] if config is not None else [SOLO_NAME]
        )
        self.index = config.index if config is not None else 0
        self.name = self.region_names[self.index]
        self.num_regions = len(self.region_names)
        self.solo = membership is None
        self.rank = 0
        self.world_size = 1
        self.is_region_main = True
        self.is_main = self.index == 0
        self.reads_data = self.index == 0
        self.data_rank = 0
        self.data_world = 1

    @property
    def mesh(self) -> DeviceMesh:
        """The region's own ranks as a DeviceMesh with the dimension "replica"."""
        if self._mesh is None:
            if not dist.is_initialized():
                backend = "nccl" if self.device.type == "cuda" else "gloo"
                # torch exports the name without saying so to type checkers.
                store = dist.HashStore()  # type: ignore[attr-defined]
                dist.init_process_group(backend, store=store, rank=0, world_size=1)
            self._mesh = init_device_mesh(
                self.device.type, (self.world_size,), mesh_dim_names=("replica",)
            )
        return self._mesh

    # ---- the model

    def segment(
        self, model: nn.Module | Callable[[], nn.Module], split: SplitLike = None
    ) -> nn.Module:
        """The layers that this region owns, under their names in the whole model.

        Args:
            model: The whole model, or a callable that builds it. The callable runs with parameters
                on the meta device, so a model of any size can be cut; the segment's parameters are
                then uninitialised until `init_weights` or `load_state_dict`.
            split: How to cut it: None for an nn.Sequential, a Split, or a callable
                (model, region) -> nn.Module that keeps the names.

        Raises:
            ConfigError: The split, the layer ranges of run.regions and the model do not match.
        """
        built = segments.build_model(model)
        if callable(split) and not isinstance(split, Split):
            part: nn.Module = split(built, self)
        else:
            part = segments.split_model(
                built, split, ranges=self._ranges(built, split), index=self.index
            )
        info = segments.describe(built, part, split)
        dtype = PRECISIONS[self._config.run.precision] if self._config is not None else None
        weights.materialise(part, device=self.device, dtype=dtype)
        part.geotrain_info = info  # type: ignore[assignment]
        return part

    def _ranges(self, model: nn.Module, split: Split | None) -> list[tuple[int, int]]:
        if self._config is None:
            return [(0, segments.count_layers(model, split))]
        return [(region.first, region.last) for region in self._config.run.regions]

    def init_weights(
        self, segment: nn.Module, init: Callable[[nn.Module, str], None] | None = None
    ) -> None:
        """Initialise a segment's parameters: the same weights whatever the split.

        Each module draws from a seed made of run.seed and its own name.

        Args:
            init: Called as `init(module, name)` for each module with parameters of its own;
                by default the module's `reset_parameters()`.
        """
        seed = self._config.run.seed if self._config is not None else 0
        weights.init_weights(segment, seed=seed, init=init)

    # ---- the pipeline

    def on_commit(self, hook: CommitHook) -> CommitHook:
        """Have `hook(result)` called after each committed step; usable as a decorator.

        For state that must follow the optimizer, such as an average of the weights. Where it has
        `state_dict` and `load_state_dict`, checkpoints carry its state. It stays for every pipeline
        of this region, also one that runs already.
        """
        self._hooks.append(hook)
        return hook

    def pipeline(
        self,
        segment: nn.Module,
        optimizer: Optimizers,
        *,
        loss_fn: LossFn,
        loss_reduction: Literal["sum", "mean"] = "mean",
        num_targets: Callable[[Any], float] = count_targets,
        scheduler: Any = None,
        max_grad_norm: float | None = None,
    ) -> Pipeline:
        """Join this region's segment with those of all other regions; waits until all are ready.

        Args:
            segment: From `segment()`, with its weights.
            optimizer: One, several, or None where nothing trains.
            loss_fn: `loss_fn(output, targets)`, a number in a tensor; used in the last region.
            loss_reduction: Whether `loss_fn` returns the sum or the mean over its targets.
            num_targets: Counts the targets of a batch or microbatch; by default the labels that
                are not -100, or the elements of real-valued targets.
            scheduler: One or several; stepped when a step commits.
            max_grad_norm: Clip the global gradient norm; by default run.max_grad_norm.

        Raises:
            ConfigError: A segment without weights or from elsewhere.
            RegionError: The regions do not fit together.
        """
        info = getattr(segment, "geotrain_info", None)
        if not isinstance(info, SegmentInfo):
            raise ConfigError("region.pipeline(): the segment must come from region.segment()")
        missing = weights.uninitialised(segment)
        if missing:
            raise ConfigError(
                f"{', '.join(missing[:3])} ({len(missing)} in all) have no weights yet: call "
                f"region.init_weights(segment) or segment.load_state_dict(...) first"
            )
        if max_grad_norm is None and self._config is not None:
            max_grad_norm = self._config.run.max_grad_norm
        check_loss(loss_fn, loss_reduction, num_targets)
        check_training(segment, _as_list(optimizer), _as_list(scheduler), max_grad_norm)
        if self._pipeline is not None:
            self._pipeline[0].close()
        if self._membership is not None:
            self._membership.assemble(info)
        context = self._context(
            segment, info, LossSpec(fn=loss_fn, reduction=loss_reduction, num_targets=num_targets)
        )
        return self._assemble(context, optimizer, scheduler, max_grad_norm)

    def _assemble(
        self, context: Context, optimizer: Optimizers, scheduler: Any, max_grad_norm: float | None
    ) -> Pipeline:
        place, parts = context.place, context.parts
        stage = Stage(
            parts.segment,
            layer_names=parts.info.layer_names,
            first=place.is_first,
            last=place.is_last,
            loss=parts.loss,
            device=self.device,
            seed=place.seed,
        )
        runtime = Runtime(
            stage,
            index=self.index,
            upstream=parts.upstream,
            downstream=parts.downstream,
            inputs=Inputs(worker=self._unpacker, device=self.device),
            group=Group(rank=self.rank, size=self.world_size),
            device=self.device,
            surroundings=context,
        )
        if self._line is None:
            self._line = Line(parts.upstream, parts.downstream, num_regions=self.num_regions)
        self._line.surroundings = context
        self._pipeline = (stage, context)
        return Pipeline(
            context,
            stage,
            runtime,
            self._line,
            optimizers=_as_list(optimizer),
            schedulers=_as_list(scheduler),
            hooks=self._hooks,
            max_grad_norm=max_grad_norm,
        )

    def _context(self, segment: nn.Module, info: SegmentInfo, loss: LossSpec) -> Context:
        run = self._config.run if self._config is not None else None
        site = self._config.site if self._config is not None else None
        place = Place(
            index=self.index,
            region_names=self.region_names,
            num_layers=self._num_layers(info),
            seed=run.seed if run is not None else 0,
            global_batch=run.global_batch if run is not None else None,
            num_microbatches=run.plan.microbatches if run is not None else 1,
            window=run.plan.window if run is not None else "classic",
            in_flight_limit=site.limits.in_flight if site is not None else None,
            in_flight_samples=site.limits.in_flight_samples if site is not None else None,
            replay=self._config.replay_path if self._config is not None else None,
            plan_log=self._config.plan_log_path if self._config is not None else None,
            default_steps=run.steps if run is not None else None,
            arena_bytes=site.arena_mib << 20 if site is not None and not self.solo else 0,
            wait_s=site.liveness.wait_s if site is not None else 0.0,
            device=self.device,
        )
        parts = Parts(
            segment=segment,
            info=info,
            loss=loss,
            upstream=self._edge(self.index - 1, BACKWARD),
            downstream=self._edge(self.index, FORWARD),
        )
        return Context(place, parts, self._membership)

    def _num_layers(self, info: SegmentInfo) -> list[int]:
        if self._config is None:
            return [len(info.layer_names)]
        return [region.last - region.first for region in self._config.run.regions]

    def _edge(self, boundary: int, direction: int) -> Edge | None:
        if self._membership is None or not 0 <= boundary < self.num_regions - 1:
            return None
        assert self._config is not None
        if boundary not in self._edges:
            other = boundary if direction == BACKWARD else boundary + 1
            compression = self._config.run.compression
            self._edges[boundary] = Edge(
                self._membership.attachment,
                Neighbour(name=self.region_names[other], own_name=self.name, boundary=boundary),
                direction=direction,
                codecs=Codecs(activations=compression.activations, gradients=compression.gradients),
                packer=self._packer,
                unpacker=self._unpacker,
            )
        edge = self._edges[boundary]
        edge.forget_agreement()
        return edge

    def close(self) -> None:
        """Leave the run in order: wait until the neighbours have taken what was sent to them.

        Called by itself when the process ends.
        """
        if self._pipeline is not None:
            self._pipeline[0].close()
            self._pipeline = None
        # What they have to say to the daemon comes before the last word.
        self._packer.close()
        self._unpacker.close()
        if self._membership is not None:
            self._membership.leave()
            self._membership = None
        if self._mesh is not None and threading.current_thread() is threading.main_thread():
            self._mesh = None
            if dist.is_initialized():
                dist.destroy_process_group()


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
