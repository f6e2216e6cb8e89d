"""What `ortgpt bench` measures: complete, consistent, and of the thing it names. No time is judged."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import onnx
import pytest
from click.testing import CliRunner

from ortgpt.bundle.folder import open_bundle
from ortgpt.cli.main import main
from ortgpt.tools import bench
from ortgpt.tools.bench import Measurements, bench_bundle, bench_lines, read_gb_per_s


@pytest.fixture(scope="module")
def found(small_bundle: Path) -> Measurements:
    return bench_bundle(small_bundle, threads=1)


def test_every_number_is_there_and_belongs_to_the_bundle(found: Measurements, small_bundle: Path) -> None:
    bundle = open_bundle(small_bundle)
    sizes = {name: entry.size for name, entry in bundle.manifest.files.items()}
    times = [value for name, value in dataclasses.asdict(found).items() if name.endswith(("_ms", "start_s"))]
    assert len(times) == 6
    assert all(value > 0 for value in (*times, *found.tokens_per_s.values(), found.memory_gb_per_s))
    assert (found.bundle, found.dtype, found.device, found.threads) == (str(small_bundle), "float32", "cpu", 1)
    assert found.disk_mb == pytest.approx(sum(sizes.values()) / 1e6)
    # A context of 64 leaves prompts of 48 and 16 new tokens.
    assert (found.short_tokens, found.long_tokens) == (48, 48)
    cache = (48 + 8) * 2 * bundle.config.n_layer * 64 * 4  # four heads of 12, padded to 16
    weights = sum(size for name, size in sizes.items() if name.startswith("model.onnx"))
    assert found.step_bytes == cache + weights
    assert set(found.tokens_per_s) == {"greedy", "sampled", "nucleus"}
    assert found.peak_memory_mb is not None
    assert 20 < found.peak_memory_mb < 2000


def test_the_profile_has_every_node_of_the_graph(found: Measurements, small_bundle: Path) -> None:
    graph = onnx.load(small_bundle / "model.onnx", load_external_data=False).graph
    for operators in (found.step, found.prefill):
        nodes = {each.name: each.nodes for each in operators}
        assert nodes["GroupQueryAttention"] == 2
        assert nodes["LayerNormalization"] <= sum(node.op_type == "LayerNormalization" for node in graph.node)
        assert [each.ms for each in operators] == sorted((each.ms for each in operators), reverse=True)


def test_the_table_and_the_json_say_the_same(found: Measurements, small_bundle: Path) -> None:
    lines = bench_lines(found)
    assert lines[0] == f"{small_bundle}: float32, cpu, threads: 1"
    table = "\n".join(lines)
    for value in (f"{found.prefill_short_ms:,.1f}", f"{found.decode_long_ms:,.2f}", f"{found.memory_gb_per_s:,.1f}"):
        assert value in table
    assert "a prefill of 48, by operator" in table
    result = CliRunner().invoke(main, ["bench", str(small_bundle), "--json", "--threads", "1"])
    assert result.exit_code == 0
    assert json.loads(result.stdout).keys() == dataclasses.asdict(found).keys()


def test_reading_memory_counts_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(bench, "_READ_BYTES", 2**20)
    monkeypatch.setattr("ortgpt.tools.bench.time.perf_counter", lambda: next(clock) * 0.5)
    assert read_gb_per_s(2) == pytest.approx(2**20 / 0.5 / 1e9)


def test_a_damaged_bundle_or_a_bad_option_is_one_line(small_bundle: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["bench", str(tmp_path / "none")])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "does not exist" in result.stderr
    result = CliRunner().invoke(main, ["bench", str(small_bundle), "--threads", "0"])
    assert (result.exit_code, result.stdout) == (2, "")
    broken = tmp_path / "broken"
    shutil.copytree(small_bundle, broken)
    (broken / "vocab.json").write_text("{}")
    result = CliRunner().invoke(main, ["bench", str(broken)])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "vocab.json" in result.stderr
