"""Which graph runs on which device: decided from lists alone, so no GPU is needed to test it."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnxruntime
import pytest

import ortgpt
from ortgpt import BundleError, DeviceError, OptionError
from ortgpt.bundle.folder import open_bundle
from ortgpt.bundle.manifest import GraphSpec, Manifest, Promise
from ortgpt.ort import device
from ortgpt.ort.device import Device, choose_graph
from ortgpt.ort.session import _check_device, open_graph, plan_session
from ortgpt.ort.threads import pool_size, startable_threads

CPU = ["CPUExecutionProvider"]
BOTH = ["CUDAExecutionProvider", "CPUExecutionProvider"]


@pytest.fixture
def graphs(small_bundle: Path) -> dict[str, GraphSpec]:
    (cpu,) = open_bundle(small_bundle).manifest.graphs
    assert cpu.cache is not None
    cuda = replace(cpu, target="cuda", file="cuda.onnx", cache=replace(cpu.cache, dtype="float16"))
    foreign = replace(cpu, flavour="portable", target="coreml", file="f.onnx", cache=replace(cpu.cache, kind="growing"))
    portable = replace(cpu, flavour="portable", cache=replace(cpu.cache, kind="growing"))
    prefill = replace(cpu, role="prefill", file="prefill.onnx")
    return {"cpu": cpu, "cuda": cuda, "portable": portable, "prefill": prefill, "foreign": foreign}


@pytest.mark.parametrize(
    ("held", "device", "providers", "found"),
    [
        (["cpu"], "auto", CPU, Device("cpu")),
        (["cpu"], "auto", BOTH, Device("cpu")),
        (["cuda"], "auto", BOTH, Device("cuda", 0)),
        (["cuda", "cpu"], "auto", BOTH, Device("cuda", 0)),
        (["cuda", "cpu"], "auto", CPU, Device("cpu")),
        (["cuda", "cpu"], "cpu", BOTH, Device("cpu")),
        (["cpu", "cuda"], "cuda", BOTH, Device("cuda", 0)),
        (["cpu", "cuda"], "cuda:3", BOTH, Device("cuda", 3)),
        (["prefill", "foreign", "cpu"], "auto", CPU, Device("cpu")),
        (["portable"], "auto", BOTH, Device("cpu")),
    ],
)
def test_the_graph_for_a_device(
    graphs: dict[str, GraphSpec], held: list[str], device: str, providers: list[str], found: Device
) -> None:
    chosen, graph = choose_graph([graphs[name] for name in held], device, providers)
    assert chosen == found
    assert graph is graphs["portable" if "portable" in held else found.target]


def test_the_cpu_runs_a_graph_made_for_a_gpu_where_there_is_no_other(graphs: dict[str, GraphSpec]) -> None:
    assert choose_graph([graphs["cuda"]], "cpu", BOTH) == (Device("cpu"), graphs["cuda"])
    assert choose_graph([graphs["cuda"], graphs["cpu"]], "cpu", BOTH) == (Device("cpu"), graphs["cpu"])


@pytest.mark.parametrize(
    ("held", "device", "providers", "error", "reason"),
    [
        (
            ["cpu", "cuda"],
            "cuda",
            CPU,
            DeviceError,
            r"CUDAExecutionProvider.*only CPUExecutionProvider.*\[cuda\]",
        ),
        (["cpu"], "cuda", BOTH, BundleError, "made for cpu, not for cuda"),
        (["portable"], "cuda", BOTH, BundleError, "made for cpu, not for cuda"),
        (["cuda"], "auto", CPU, DeviceError, "made for cuda, but ONNX Runtime here has only CPU.*choose device cpu"),
        (
            ["prefill"],
            "auto",
            CPU,
            BundleError,
            r"runs none of the bundle's graphs \(prefill, native, cpu, fixed float32",
        ),
        (["foreign"], "cpu", CPU, BundleError, "none of the bundle's graphs .*portable, coreml, growing"),
        (["cpu"], "gpu", CPU, OptionError, "device = 'gpu' .*auto, cpu, cuda, cuda:N"),
        (["cpu"], "cuda:", BOTH, OptionError, "device = 'cuda:'"),
        (["cpu"], "cpu:0", BOTH, OptionError, "device = 'cpu:0'"),
        (["cpu"], None, BOTH, OptionError, "device = None"),
    ],
)
def test_a_device_that_cannot_serve_is_an_error_never_a_fallback(
    graphs: dict[str, GraphSpec],
    held: list[str],
    device: Any,
    providers: list[str],
    error: type[Exception],
    reason: str,
) -> None:
    with pytest.raises(error, match=reason):
        choose_graph([graphs[name] for name in held], device, providers)


def test_devices_have_names() -> None:
    assert (str(Device("cpu")), str(Device("cuda", 2))) == ("cpu", "cuda:2")


def test_a_second_graph_is_part_of_the_contract(small_bundle: Path, graphs: dict[str, GraphSpec]) -> None:
    """The manifest holds a prefill graph and another precision's promise without a change of format."""
    import json

    manifest = open_bundle(small_bundle).manifest
    promise = Promise(kind="bounded", logit_bound=0.2, argmax_changes_in_batch=0.5)
    wider = replace(
        manifest,
        graphs=(*manifest.graphs, graphs["prefill"], graphs["foreign"], graphs["cuda"]),
        precision=replace(manifest.precision, dtype="int8", recipe="w8a8", parameters={"block": 128}, promise=promise),
    )
    again = Manifest.from_values(json.loads(wider.to_json()))
    assert again == wider
    chosen, graph = choose_graph(again.graphs, "auto", CPU)
    assert (chosen, graph.file) == (Device("cpu"), "model.onnx")


def test_a_session_that_fell_back_is_refused(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = open_bundle(small_bundle)
    manifest = replace(bundle.manifest, graphs=(replace(bundle.manifest.graphs[0], target="cuda"),))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: BOTH)

    class Fallen:
        def __init__(self, *args: object, **keywords: object) -> None:
            assert keywords == {"providers": [("CUDAExecutionProvider", {"device_id": 1})], "enable_fallback": 0}
            assert args[1].get_session_config_entry("session.disable_cpu_ep_fallback") == "1"  # type: ignore[attr-defined]

        def get_providers(self) -> list[str]:
            return CPU

    monkeypatch.setattr(onnxruntime, "InferenceSession", Fallen)
    with pytest.raises(DeviceError, match=r"asked for cuda:1, but ONNX Runtime opened \['CPUExecutionProvider'\]"):
        plan_session(replace(bundle, manifest=manifest), device="cuda:1").open()


def test_a_session_with_nodes_elsewhere_is_refused(small_bundle: Path) -> None:
    """The assignment is ONNX Runtime's own; only the provider that should have had the nodes is made up."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = onnxruntime.InferenceSession(small_bundle / "model.onnx", options, providers=CPU)
    if not hasattr(session, "get_provider_graph_assignment_info"):
        pytest.skip("this onnxruntime does not tell its assignment")

    class Pretending:
        def get_providers(self) -> list[str]:
            return BOTH

        def get_provider_graph_assignment_info(self) -> Any:
            return session.get_provider_graph_assignment_info()

    with pytest.raises(DeviceError, match=r"asked for cuda:0, but ONNX Runtime runs .*GroupQueryAttention on CPU"):
        _check_device(Pretending(), Device("cuda"))
    Pretending.get_provider_graph_assignment_info = lambda self: []  # type: ignore[method-assign]
    with pytest.raises(DeviceError, match="runs nothing there; check the GPU driver"):
        _check_device(Pretending(), Device("cuda"))


def test_a_provider_that_takes_no_node_is_an_error_of_the_device(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As CUDA without its libraries: ONNX Runtime would give every node to the CPU. Azure's provider takes none."""
    monkeypatch.setitem(device.PROVIDERS, "cuda", "AzureExecutionProvider")
    bundle = open_bundle(small_bundle)
    with pytest.raises(DeviceError, match=r"cannot open .*model\.onnx on cuda:0: .*; check the GPU driver and"):
        open_graph(bundle, bundle.manifest.graphs[0], Device("cuda"))
    assert capfd.readouterr().out == ""


def test_gpu_loads_at_once_leave_the_output_of_others_alone(
    small_bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: Any
) -> None:
    """sys.stdout belongs to the process: what ONNX Runtime prints is logged, and what others print is printed."""
    bundle = open_bundle(small_bundle)
    manifest = replace(bundle.manifest, graphs=(replace(bundle.manifest.graphs[0], target="cuda"),))
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: BOTH)
    both_inside, first_left = threading.Barrier(3), threading.Event()
    ends = iter((lambda: None, lambda: first_left.wait(60)))

    def preload_dlls(cuda: bool = True, *, sign: str = "!") -> None:
        print("Failed to load", "libcudnn.so.9", end=sign)  # noqa: T201  # as ONNX Runtime does
        both_inside.wait(60)
        next(ends)()

    class Opened:
        def __init__(self, *args: object, **keywords: object) -> None:
            first_left.set()

        def get_providers(self) -> list[str]:
            raise DeviceError("far enough")

    monkeypatch.setattr(onnxruntime, "preload_dlls", preload_dlls, raising=False)
    monkeypatch.setattr(onnxruntime, "InferenceSession", Opened)
    monkeypatch.setattr("ortgpt.ort.session.multiplies_exactly", lambda ort: True)
    caplog.set_level("DEBUG", logger="ortgpt")
    before = sys.stdout
    with ThreadPoolExecutor(2) as pool:
        loads = [pool.submit(plan_session(replace(bundle, manifest=manifest), device="cuda").open) for _ in range(2)]
        both_inside.wait(60)
        print("the app's own line")  # noqa: T201  # as an app does
        for load in loads:
            with pytest.raises(DeviceError, match="far enough"):
                load.result()
    assert sys.stdout is before
    assert capsys.readouterr().out == "the app's own line\n"
    assert [record.message for record in caplog.records] == ["Failed to load libcudnn.so.9"] * 2


@pytest.mark.parametrize("threads", [0, -1, 257, 2**31, True, 1.0, "2"])
def test_bad_thread_counts_are_refused(small_bundle: Path, threads: Any) -> None:
    with pytest.raises(OptionError, match=r"threads = .* \(accepted: an integer from 1 to 256, or None"):
        plan_session(open_bundle(small_bundle), threads=threads).open()


def test_session_settings(small_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    real = onnxruntime.InferenceSession

    def spy(path: str, options: Any, **keywords: Any) -> Any:
        seen.append(options)
        return real(path, options, **keywords)

    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    monkeypatch.setattr("ortgpt.ort.session.allowed_cpus", lambda: 3)
    monkeypatch.setattr("ortgpt.ort.session.multiplies_exactly", lambda ort: True)
    assert plan_session(open_bundle(small_bundle)).open().threads == 3
    assert plan_session(open_bundle(small_bundle), threads=2).open().threads == 2
    assert [options.intra_op_num_threads for options in seen] == [3, 2]


@pytest.mark.parametrize("exact", [True, False])
def test_products_of_bytes_are_made_exact_where_they_are_not(
    exact: bool, small_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    real = onnxruntime.InferenceSession

    def spy(path: str, options: Any, **keywords: Any) -> Any:
        seen.append(options)
        return real(path, options, **keywords)

    monkeypatch.setattr("ortgpt.ort.session.multiplies_exactly", lambda ort: exact)
    monkeypatch.setattr(onnxruntime, "InferenceSession", spy)
    plan_session(open_bundle(small_bundle)).open()
    if exact:
        with pytest.raises(RuntimeError, match="does not have configuration"):
            seen[0].get_session_config_entry("session.x64quantprecision")
    else:
        assert seen[0].get_session_config_entry("session.x64quantprecision") == "1"


def test_loading_for_a_device_that_is_not_there(small_bundle: Path) -> None:
    with pytest.raises(BundleError, match="made for cpu, not for cuda"):
        ortgpt.load(small_bundle, device="cuda")


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many more threads can be started, as where a control group limits them; tests set the only entry."""
    left, start = [0], threading.Thread.start
    running: set[threading.Thread] = set()

    def limited(thread: threading.Thread) -> None:
        running.intersection_update(threading.enumerate())
        if len(running) >= left[0]:
            raise RuntimeError("can't start new thread")
        start(thread)
        running.add(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left


def test_the_pool_is_no_larger_than_the_threads_that_can_be_started(
    few_threads: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """ONNX Runtime hangs where it cannot start all threads of its pool."""
    for most, size in ((0, 1), (2, 3), (4, 5), (5, 6), (9, 6)):
        few_threads[0] = most
        assert startable_threads(9) == most
        caplog.clear()
        assert pool_size(None, 6) == size
        assert [record.message.partition(" (")[0] for record in caplog.records] == (
            [f"the pool has {size} of 6 threads"] if size < 6 else []
        )
    few_threads[0] = 2
    assert pool_size(3, 3) == 3
    with pytest.raises(OptionError, match=r"threads = 4 \(accepted: at most 3 now: .*lets this process start 2 more\)"):
        pool_size(4, 4)


def test_a_load_needs_no_thread_besides_the_callers(
    small_bundle: Path, small: ortgpt.Generator, few_threads: list[int]
) -> None:
    want = small.generate("a man", max_new_tokens=3).token_ids
    with ortgpt.load(small_bundle, threads=1) as generator:
        assert generator.generate("a man", max_new_tokens=3).token_ids == want
        with pytest.raises(ortgpt.EngineError, match="no thread for an asynchronous call: can't start new thread"):
            asyncio.run(generator.agenerate("a", max_new_tokens=2))
        few_threads[0] = 1
        assert asyncio.run(generator.agenerate("a man", max_new_tokens=3)).token_ids == want
    damaged = shutil.copytree(small_bundle, small_bundle.parent / "damaged")
    data = bytearray((damaged / "model.onnx.data").read_bytes())
    data[100] ^= 1
    (damaged / "model.onnx.data").write_bytes(data)
    few_threads[0] = 0
    with pytest.raises(BundleError, match="does not have the sha256"):
        ortgpt.load(damaged, threads=1)
