"""Which device runs a bundle, and which of its graphs. Opens nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ortgpt.bundle.manifest import GraphSpec
from ortgpt.contract import CACHE_KINDS, DType, Role, Target
from ortgpt.errors import BundleError, DeviceError, OptionError
from ortgpt.ort.package import install_hint

PROVIDERS = {Target.CPU: "CPUExecutionProvider", Target.CUDA: "CUDAExecutionProvider"}


@dataclass(frozen=True)
class Device:
    """Where a graph runs: "cpu", or "cuda" with the index of the GPU."""

    target: str
    index: int = 0

    def __str__(self) -> str:
        return self.target if self.is_cpu else f"{self.target}:{self.index}"

    @property
    def is_cpu(self) -> bool:
        """Whether it is the CPU."""
        return self.target == Target.CPU

    @property
    def provider(self) -> str:
        """The name of the ONNX Runtime execution provider."""
        return PROVIDERS[self.target]


def choose_graph(graphs: Sequence[GraphSpec], device: str, providers: Sequence[str]) -> tuple[Device, GraphSpec]:
    """Return the device to run on and the graph to run.

    "auto" takes the bundle's first graph whose target is among the available `providers`; "cpu" takes the graph made
    for it, else any. Raises DeviceError if the device is not available, BundleError if the bundle has no graph for it,
    OptionError for an unknown name.
    """
    usable = [graph for graph in graphs if _is_known(graph)]
    if not usable:
        shown = "; ".join(map(str, graphs))
        raise BundleError(f"this version of ortgpt runs none of the bundle's graphs ({shown}); use a newer one")
    targets = [graph.target for graph in usable]
    if device == "auto":
        for graph in usable:
            if PROVIDERS[graph.target] in providers:
                return Device(graph.target), graph
        raise DeviceError(
            f"this bundle is made for {list_names(targets)}, but ONNX Runtime here has only {list_names(providers)}; "
            "choose device cpu to run it there"
        )
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,4}))?", device) if isinstance(device, str) else None
    if match is None:
        raise OptionError.bad_value("device", device, "auto, cpu, cuda, cuda:N")
    chosen = Device(device.partition(":")[0], int(match[1] or 0))
    # The CPU can run every graph, but prefers one made for it. A GPU runs only graphs that were made for it.
    fitting = sorted(usable, key=lambda graph: graph.target != chosen.target)
    if fitting[0].target != chosen.target and not chosen.is_cpu:
        raise BundleError(
            f"this bundle is made for {list_names(targets)}, not for {chosen.target}; choose device auto, or export it "
            f"with --target {chosen.target}"
        )
    if chosen.provider not in providers:
        raise DeviceError(
            f"device {device} needs {chosen.provider}, but ONNX Runtime here has only {list_names(providers)}; "
            f"{install_hint(chosen.target)}, or choose another device"
        )
    return chosen, fitting[0]


def _is_known(graph: GraphSpec) -> bool:
    """Tell whether this runtime can run a graph of this kind; a bundle may also hold others."""
    return (
        graph.role == Role.CLASSIFIER
        and graph.target in PROVIDERS
        and graph.flavour in CACHE_KINDS
        and graph.cache is None
    ) or (
        graph.role == Role.DECODER
        and graph.target in PROVIDERS
        and graph.cache is not None
        and graph.cache.kind == CACHE_KINDS.get(graph.flavour)
        and graph.cache.dtype in (DType.FLOAT32, DType.FLOAT16)
    )


def list_names(names: Sequence[str]) -> str:
    """Join names with commas; "nothing" if there are none."""
    return ", ".join(names) or "nothing"
