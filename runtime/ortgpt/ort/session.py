"""Open a graph of a bundle in ONNX Runtime on a device, or say why not. Knows no tokens and no cache."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ortgpt.background import Background
from ortgpt.bundle.external_data import external_files
from ortgpt.bundle.folder import Bundle
from ortgpt.bundle.manifest import CacheSpec, GraphSpec
from ortgpt.contract import DType, File, KVShape, Role, Spec, Target, classifier_tensors, graph_tensors, topk_tensors
from ortgpt.errors import BundleError, ClosedError, DeviceError, OptionError, listed
from ortgpt.forks import FORKED
from ortgpt.native_call import native_call
from ortgpt.ort.cpus import allowed_cpus
from ortgpt.ort.device import PROVIDERS, Device, choose_graph, list_names
from ortgpt.ort.integer_probe import multiplies_exactly
from ortgpt.ort.made_weights import MadeWeights
from ortgpt.ort.package import comes_from_onnxruntime, import_onnxruntime, install_hint
from ortgpt.ort.threads import pool_size

_logger = logging.getLogger("ortgpt")
_DTYPES = {
    "tensor(float)": DType.FLOAT32,
    "tensor(float16)": DType.FLOAT16,
    "tensor(int32)": DType.INT32,
    "tensor(int64)": DType.INT64,
}
_MAX_THREADS = 256  # a larger pool takes seconds to start, and no GPT-2 gains by it


@dataclass(eq=False)
class Session:
    """An open graph. `handle` is the onnxruntime.InferenceSession, safe to call from several threads.

    In a forked process the handle raises ClosedError. ONNX Runtime's threads do not exist there, and a run would wait
    for them forever, as would freeing the handle.
    """

    handle: Any
    onnxruntime: ModuleType
    graph: GraphSpec
    device: Device
    threads: int
    made: MadeWeights | None = None
    """The weights that were made for it and that it reads, if there are any."""

    def __post_init__(self) -> None:
        _opened.add(self)

    @property
    def cache(self) -> CacheSpec:
        """The cache that the graph works on; a decoder has one."""
        assert self.graph.cache is not None
        return self.graph.cache

    def share(self, array: npt.NDArray[Any]) -> Any:
        """Return an OrtValue over the memory of a numpy array."""
        return self.onnxruntime.OrtValue.ortvalue_from_numpy(array)

    def copy_in(self, array: npt.NDArray[Any]) -> Any:
        """Return an OrtValue on the device that holds a copy of a numpy array (on the CPU, the array itself)."""
        return self.onnxruntime.OrtValue.ortvalue_from_numpy(array, self.device.target, self.device.index)

    def empty(self, shape: Sequence[int], dtype: str) -> Any:
        """Return an OrtValue on the device with undefined contents."""
        return self.onnxruntime.OrtValue.ortvalue_from_shape_and_type(
            list(shape), np.dtype(dtype), self.device.target, self.device.index
        )


class _ForkedHandle:
    def __getattr__(self, name: str) -> Any:
        raise ClosedError(FORKED)


_opened: weakref.WeakSet[Session] = weakref.WeakSet()


def _give_up_handles() -> None:
    for session in _opened:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session.handle))  # never freed
        session.handle = _ForkedHandle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_give_up_handles)


@dataclass(frozen=True)
class SessionPlan:
    """A graph to open on a chosen device. Opening releases the GIL, so it can run in a thread."""

    open: Callable[[], Session]
    cancel: Callable[[], None]
    """Lets open(), which runs in another thread, fail soon. Versions before 1.32 may open the graph first."""


def plan_session(bundle: Bundle, *, device: str = "auto", threads: int | None = None) -> SessionPlan:
    """Choose device and options now; return what opens the bundle's graph for `device`.

    `device` is "auto", "cpu", "cuda" or "cuda:N"; `threads` is the number of CPU threads of an operator, by default the
    CPUs that this process may use. Raises DeviceError if the device or ONNX Runtime is not usable, OptionError for a
    bad `device` or `threads`, and, here or when opening, BundleError if the bundle holds no graph for the device or the
    graph is not what the manifest says.
    """
    ort = import_onnxruntime(bundle.manifest.minimum_onnxruntime)
    chosen, graph = choose_graph(bundle.manifest.graphs, device, ort.get_available_providers())
    return _plan(ort, bundle, graph, chosen, threads, is_demand=True)


def open_graph(
    bundle: Bundle, graph: GraphSpec, device: Device, *, threads: int | None = None, profile: Path | None = None
) -> Session:
    """Open one graph of a bundle on a device, whatever device it was made for; raises as plan_session() does.

    The pool has fewer than `threads` where no more can be started. With `profile`, the beginning of a file name, ONNX
    Runtime records the time of each node.
    """
    ort = import_onnxruntime(bundle.manifest.minimum_onnxruntime)
    plan = _plan(ort, bundle, graph, device, threads, is_demand=False, profile=profile)
    with Background(plan.open, stop=plan.cancel, daemon=False) as opening:  # the main thread hears Ctrl-C
        return opening.result()


def _plan(
    ort: ModuleType,
    bundle: Bundle,
    graph: GraphSpec,
    device: Device,
    threads: int | None,
    *,
    is_demand: bool,
    profile: Path | None = None,
) -> SessionPlan:
    count = allowed_cpus() if threads is None else threads
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MAX_THREADS:
        accepted = f"an integer from 1 to {_MAX_THREADS}, or None for all CPUs allowed"
        raise OptionError.bad_value("threads", threads, accepted)
    options = ort.SessionOptions()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    # Threads that spin after a run halve the speed of whatever runs next: another session, or numpy.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if device.is_cpu and not multiplies_exactly(ort):  # where products are exact it would halve the speed
        options.add_session_config_entry("session.x64quantprecision", "1")

    def open_() -> Session:
        path = bundle.path / graph.file
        weights = external_files(path)
        made = MadeWeights(bundle, graph) if File.MADE in weights else None
        if made is not None:
            weights -= {File.MADE}
            made.give_to(ort, options)
        unlisted = weights - bundle.manifest.files.keys()
        if unlisted:
            raise BundleError(
                f"{path} reads weights from {list_names(sorted(unlisted))}, which the manifest does not list"
            )
        options.intra_op_num_threads = pool = pool_size(threads if is_demand else None, count)
        with native_call:
            handle = _open_cpu(ort, path, options) if device.is_cpu else _open_gpu(ort, path, options, device)
        bundle.check_same({graph.file, *weights, *(matrix.file for matrix in graph.made)})
        _check_tensors(bundle, graph, handle)
        if made is not None:
            made.free_if_copied(handle)
        return Session(handle, ort, graph, device, pool, made)

    return SessionPlan(open_, cancel=lambda: options.set_load_cancellation_flag(True))


def _open_cpu(ort: ModuleType, path: Path, options: Any) -> Any:
    try:
        return ort.InferenceSession(str(path), options, providers=[PROVIDERS[Target.CPU]], enable_fallback=0)
    except Exception as error:
        if not comes_from_onnxruntime(error):
            raise
        if sys.platform == "linux" and not os.path.exists("/proc/self/fd"):
            raise DeviceError(
                f"ONNX Runtime cannot open {path} without /proc, which is not mounted here; mount it "
                f"(`mount -t proc proc /proc`): {error}"
            ) from error
        raise BundleError(f"ONNX Runtime cannot open {path}: {error}") from error


def _open_gpu(ort: ModuleType, path: Path, options: Any, device: Device) -> Any:
    """Open a graph on a GPU, or raise DeviceError: every node has to run there, and there is no fallback."""
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    try:
        _preload_libraries(ort)
        handle = ort.InferenceSession(
            str(path), options, providers=[(device.provider, {"device_id": device.index})], enable_fallback=0
        )
    except Exception as error:
        if not comes_from_onnxruntime(error):
            raise
        raise DeviceError(f"ONNX Runtime cannot open {path} on {device}: {error}; {_gpu_hint()}") from error
    _check_device(handle, device)
    return handle


def _preload_libraries(ort: ModuleType) -> None:
    """Load the CUDA and cuDNN libraries from the wheels of [cuda], and log what ONNX Runtime prints about them.

    sys.stdout belongs to the whole process, so the function is called with a print() of its own instead.
    """
    preload = getattr(ort, "preload_dlls", None)
    if isinstance(preload, FunctionType):
        names = preload.__globals__ | {"print": lambda *values, **_: _logger.debug("%s", " ".join(map(str, values)))}
        defaults = preload.__kwdefaults__
        preload = FunctionType(preload.__code__, names, preload.__name__, preload.__defaults__, preload.__closure__)
        preload.__kwdefaults__ = defaults
    if preload is not None:
        preload()


def _gpu_hint() -> str:
    return f"check the GPU driver and the CUDA libraries; to install matching ones, {install_hint(Target.CUDA)}"


def _check_device(handle: Any, device: Device) -> None:
    """Raise DeviceError unless the session's first provider is the device's, and every node is assigned to it."""
    if handle.get_providers()[0] != device.provider:
        raise DeviceError(f"asked for {device}, but ONNX Runtime opened {handle.get_providers()}; {_gpu_hint()}")
    if not hasattr(handle, "get_provider_graph_assignment_info"):
        return  # an older onnxruntime does not tell, but it has disable_cpu_ep_fallback
    parts = handle.get_provider_graph_assignment_info()
    providers_of = {node.op_type: part.ep_name for part in parts for node in part.get_nodes()}
    elsewhere = {op_type: provider for op_type, provider in providers_of.items() if provider != device.provider}
    if elsewhere or not parts:
        shown = ", ".join(f"{op_type} on {provider}" for op_type, provider in sorted(elsewhere.items()))
        raise DeviceError(f"asked for {device}, but ONNX Runtime runs {shown or 'nothing there'}; {_gpu_hint()}")


def _check_tensors(bundle: Bundle, graph: GraphSpec, handle: Any) -> None:
    """Compare the graph's tensors, types and axes with the contract, and their names with the manifest.

    Raises BundleError with every difference.
    """
    config, cache = bundle.config, graph.cache
    if graph.role == Role.CLASSIFIER:
        labels = () if bundle.labels is None else bundle.labels.labels
        inputs, outputs = classifier_tensors(bundle.manifest.task, len(labels))
    elif graph.role == Role.SELECTOR or cache is None:
        inputs, outputs = topk_tensors(config.vocab_size, config.vocab_size - bundle.manifest.masked_tokens)
    else:
        kv_shape = KVShape(n_layer=config.n_layer, n_head=config.n_head, head_dim=cache.head_dim, dtype=cache.dtype)
        n_embd = config.n_embd if graph.has_hidden_states else None
        inputs, outputs = graph_tensors(graph.flavour, kv_shape, config.vocab_size, n_embd)
    found = {
        tensor.name: (_DTYPES.get(tensor.type, tensor.type), tuple(tensor.shape))
        for tensor in (*handle.get_inputs(), *handle.get_outputs())
    }
    wanted = inputs | outputs
    faults = [
        f"{name} is {_shown(found.get(name))}, expected {_shown(wanted.get(name))}"
        for name in sorted(found.keys() | wanted.keys())
        if found.get(name) != wanted.get(name)
    ]
    faults += [f"{name} differs from the manifest" for name in sorted({*graph.inputs, *graph.outputs} ^ wanted.keys())]
    if faults:
        raise BundleError(
            f"{bundle.path / graph.file} is not the {graph.flavour} {graph.role} of {config.n_layer} layers that the "
            f"bundle describes: {listed(faults)}"
        )


def _shown(spec: Spec | None) -> str:
    return "absent" if spec is None else f"{spec[0]} ({', '.join(map(str, spec[1]))})"
