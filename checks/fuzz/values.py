"""Damage parsed JSON: pure functions from values to odd ones, and to their text.

Every choice comes from the random.Random of the caller, so a seed names an input.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

MANIFEST = "ortgpt.json"

# Values contain a mark, "@kind:count@", for what json.dumps cannot write; the text gets it in place of the mark.
_MARK = re.compile(r'"@(\w+):(\d+)@"')
_TWICE = re.compile(r'"@twice:(.*?)@"')
_TEXT_OF: dict[str, Callable[[int], str]] = {
    "lists": lambda count: "[" * count + "]" * count,
    "objects": lambda count: '{"a":' * count + "1" + "}" * count,
    "open": lambda count: "[" * count,
    "digits": lambda count: "9" * count,
    "exponent": lambda count: f"1e{count}",
    "keys": lambda count: "{" + ",".join(f'"k{index:06}":1' for index in range(count)) + "}",
    "keys_and_one_twice": lambda count: "{" + ",".join(f'"k{index:06}":1' for index in (*range(count), 0)) + "}",
}
_INTEGERS = (0, 1, -1, 2, 3, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, 10**400, -(10**400))
_NUMBERS = (0.5, -0.5, -0.0, 1e308, -1e308, 5e-324, 1e-30, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", " ", "\0", "é", "日本語", "\ud800", "\udc00x", "a\n", "[]", "\x1b[31m", "x" * 300, "x" * 200_000)
_NAMES = (
    "/etc/passwd", "../x", "..", ".", "", "a/b", "a\\b", "C:\\x", "x\0y", "\0", "x" * 255, "x" * 300, "x" * 5000,
    "ortgpt.json", "config.json", "model.onnx", "model.onnx.data", "vocab.json/", "./config.json", "CON", "\ud800",
)  # fmt: skip
_WORDS = (
    "decoder", "prefill", "selector", "native", "portable", "cpu", "cuda", "fixed", "growing", "float32", "float16",
    "int8", "int4", "exact", "bounded", "batch_dependent", "text-generation", "pre", "post", "byte-level-bpe", "logits",
)  # fmt: skip
_VERSIONS = (
    "0", "1", "99999", "999999.999999", "1.23.2.dev1", "1" * 7, "1..2", ".", "1.2\n", "١.٢", "-1", "v1", "", 1.23, 1,
    None,
)  # fmt: skip
_CONFIG_KEYS = ("n_layer", "n_head", "n_positions", "vocab_size", "bos_token_id", "eos_token_id")
_OPTIONS = (
    "do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "no_repeat_ngram_size",
    "suppress_tokens", "max_new_tokens", "min_new_tokens", "eos_token_id", "num_beams", "length_penalty", "stop",
)  # fmt: skip
_EVIDENCE: dict[str, Any] = {
    "text": "t", "tokens": 9, "perplexity": 2.0, "baseline_perplexity": 2.0, "bits_per_byte": 1.0,
    "baseline_bits_per_byte": 1.0, "kl": 0.0, "top1": 1.0, "top5": 1.0, "bytes_per_parameter": 1.0,
    "prefill_tokens_per_s": 1.0, "baseline_prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 1.0,
    "baseline_decode_tokens_per_s": 1.0, "threads": 1, "cpu_features": ["avx2"], "matrices": {"int8": 1},
    "left_out": {"wpe": "small"},
}  # fmt: skip


def mutate_values(rng: Random, name: str, values: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Damage parsed JSON in one to three places; about half of the changes aim at what the file's reader checks."""
    changed = copy.deepcopy(values)
    aimed = {MANIFEST: _MANIFEST_WAYS, "config.json": _CONFIG_WAYS, "generation_config.json": _OPTION_WAYS}.get(
        name, {}
    )
    names = []
    for _ in range(rng.choice((1, 1, 1, 1, 2, 3))):
        ways = aimed if aimed and rng.random() < 0.5 else _ANY_WAYS
        way = rng.choice(list(ways))
        ways[way](rng, changed)
        names.append(way)
    return " and ".join(dict.fromkeys(names)), changed


def to_text(rng: Random, values: dict[str, Any]) -> bytes:
    """Write values as JSON, and put its text in the place of each mark."""
    text = json.dumps(values, indent=rng.choice((None, 2)), ensure_ascii=True)
    return _TWICE.sub(r'"\1"', _expand(text)).encode()


def sealed(values: dict[str, Any]) -> dict[str, Any]:
    """Give a manifest the sha256 that matches its values, computed without the package."""
    rest = {key: value for key, value in values.items() if key != "sha256"}
    text = _expand(json.dumps(rest, sort_keys=True, separators=(",", ":")), exponent="Infinity")
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def odd_value(rng: Random) -> Any:
    """Return a value that a reader may not expect."""
    kind = rng.randrange(11)
    if kind == 0:
        return rng.choice(
            (None, True, False, [], {}, [None], {"": None}, [[]], ["\ud800"], {"a": {"b": 1}}, ["x"] * 999)
        )
    if kind in (1, 10):
        return _mark(rng)
    if kind <= 4:
        return rng.choice(_INTEGERS)
    if kind <= 6:
        return rng.choice(_NUMBERS)
    return rng.choice(rng.choice((_TEXTS, _NAMES, _WORDS)))


def _mark(rng: Random) -> str:
    """Return a mark for long or deep text; Python's stack has room for about 1,000 levels."""
    depth = rng.choice((10, 300, rng.randint(970, 1000), rng.randint(970, 1000), rng.randint(970, 1000), 100_000))
    choices = [f"@{kind}:{depth}@" for kind in ("lists", "objects", "open")]
    choices += [f"@digits:{rng.choice((400, 4300, 4301, 100_000))}@", "@exponent:999@", "@keys:2000@"]
    if rng.random() < 0.01:  # it may take seconds
        choices = ["@keys_and_one_twice:30000@"]
    return rng.choice(choices)


def _expand(text: str, *, exponent: str | None = None) -> str:
    def replace(match: re.Match[str]) -> str:
        kind = match[1]
        if kind not in _TEXT_OF:
            return match[0]
        return exponent if kind == "exponent" and exponent else _TEXT_OF[kind](int(match[2]))

    return _MARK.sub(replace, text)


def _places(values: Any) -> list[tuple[Any, Any]]:
    """Return each key of every container in the values, with its container."""
    places, remaining = [], [values]
    while remaining:
        container = remaining.pop()
        for key in list(container) if isinstance(container, dict) else range(len(container)):
            places.append((container, key))
            if isinstance(container[key], (dict, list)):
                remaining.append(container[key])
    return places


def _place(rng: Random, values: dict[str, Any], kind: type | tuple[type, ...] = object) -> tuple[Any, Any]:
    """Return a container and one of its keys, with a value of this kind if there is one."""
    places = _places(values)
    fitting = [(container, key) for container, key in places if isinstance(container[key], kind)] or places
    if not fitting:
        values["x"] = 1
        return values, "x"
    return rng.choice(fitting)


def _drop(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values)
    del container[key]


def _rename(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values)
    if isinstance(container, dict):
        container[rng.choice((f"{key}x", str(key).upper(), "", "\ud800", "\0", "x" * 1000))] = container.pop(key)


def _twice(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values)
    if isinstance(container, dict):
        container[f"@twice:{key}@"] = rng.choice((container[key], odd_value(rng)))


def _replace(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values)
    container[key] = odd_value(rng)


def _nudge(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values, (int, float))
    value = container[key]
    if isinstance(value, (int, float)):
        small = abs(value) < 1e300
        container[key] = rng.choice((value + 1, value - 1, -value, *((value * 2, float(value)) if small else ())))


def _reword(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values, str)
    container[key] = rng.choice((*_WORDS, *_TEXTS[:8]))


def _insert(rng: Random, values: dict[str, Any]) -> None:
    container, _ = _place(rng, values)
    value = odd_value(rng)
    if isinstance(container, dict):
        container[rng.choice(("x", "", "\ud800", "sha256", "colour"))] = value
    else:
        container.append(value)


def _swap(rng: Random, values: dict[str, Any]) -> None:
    (one, key), (two, other) = _place(rng, values), _place(rng, values)
    one[key], two[other] = copy.deepcopy(two[other]), copy.deepcopy(one[key])


def _repeat(rng: Random, values: dict[str, Any]) -> None:
    container, key = _place(rng, values, list)
    if isinstance(container[key], list):
        container[key] = copy.deepcopy(container[key]) * rng.choice((2, 3, 100))


_ANY_WAYS: dict[str, Callable[[Random, dict[str, Any]], None]] = {
    "key dropped": _drop, "key renamed": _rename, "key twice": _twice, "value replaced": _replace,
    "other replaced": _replace, "number nudged": _nudge, "word replaced": _reword, "value inserted": _insert,
    "values swapped": _swap, "list repeated": _repeat,
}  # fmt: skip


def _version(rng: Random, values: dict[str, Any]) -> None:
    if rng.random() < 0.5:
        values["minimum_onnxruntime"] = rng.choice(_VERSIONS)
    elif isinstance(values.get("format"), dict):
        values["format"][rng.choice(("major", "minor"))] = rng.choice((0, 2, 99, -1, 10**400, "1", 1.0, None, True))


def _file_name(rng: Random, values: dict[str, Any]) -> None:
    name, graph = rng.choice(_NAMES), _graph(rng, values)
    files = values.get("files")
    if graph is not None and rng.random() < 0.4:
        graph["file"] = name
    if isinstance(files, dict) and files:
        old = rng.choice(list(files))
        files[name] = copy.deepcopy(files[old])
        if rng.random() < 0.3:
            del files[old]


def _size(rng: Random, values: dict[str, Any]) -> None:
    files = values.get("files")
    entries = [entry for entry in files.values() if isinstance(entry, dict)] if isinstance(files, dict) else []
    if entries:
        rng.choice(entries)[rng.choice(("size", "sha256"))] = rng.choice((odd_value(rng), "A" * 64, "0" * 64, "0" * 63))


def _graph(rng: Random, values: dict[str, Any]) -> dict[str, Any] | None:
    graphs = values.get("graphs")
    fitting = [graph for graph in graphs if isinstance(graph, dict)] if isinstance(graphs, list) else []
    return rng.choice(fitting) if fitting else None


def _edit_graph(rng: Random, values: dict[str, Any]) -> None:
    """Change a graph, or add a copy of one, for example with a role that is opened beside it."""
    graph = _graph(rng, values)
    if graph is None:
        return
    if rng.random() < 0.6:
        added = copy.deepcopy(graph)
        values["graphs"].insert(rng.randint(0, len(values["graphs"])), added)
        added["role"] = rng.choice(("prefill", "selector", "decoder", "other"))
        graph = added
        if rng.random() < 0.4:
            return
    cache = graph.get("cache")
    part = rng.choice(("role", "flavour", "target", "file", "inputs", "cache", "kind", "dtype", "head_dim"))
    if part in ("kind", "dtype", "head_dim"):
        if isinstance(cache, dict):
            cache[part] = rng.choice((*_INTEGERS, 8, 12)) if part == "head_dim" else rng.choice(_WORDS)
    elif part == "inputs":
        inputs = graph.get("inputs")
        more = ["\ud800", *inputs] if isinstance(inputs, list) else None
        graph["inputs"] = rng.choice(([], more, more, ["x"] * 9, ["logits"], [1]))
    elif part == "cache":
        graph["cache"] = rng.choice((None, {}, [], 1))
    else:
        graph[part] = rng.choice(_NAMES if part == "file" else _WORDS)


def _evidence(rng: Random, values: dict[str, Any]) -> None:
    values["evidence"] = evidence = copy.deepcopy(_EVIDENCE)
    if rng.random() < 0.8:
        (_replace if rng.random() < 0.6 else _nudge)(rng, evidence)


def _number_of_manifest(rng: Random, values: dict[str, Any]) -> None:
    values["masked_tokens"] = rng.choice((*_INTEGERS, 299, 300, 301))


def _promise(rng: Random, values: dict[str, Any]) -> None:
    if isinstance(values.get("precision"), dict):
        values["precision"][rng.choice(("promise", "parameters"))] = {rng.choice(("kind", "x")): odd_value(rng)}


_MANIFEST_WAYS: dict[str, Callable[[Random, dict[str, Any]], None]] = {
    "version": _version, "file name": _file_name, "size or hash": _size, "graph": _edit_graph,
    "another graph": _edit_graph, "evidence": _evidence, "masked tokens": _number_of_manifest, "promise": _promise,
}  # fmt: skip


def _config_number(rng: Random, values: dict[str, Any]) -> None:
    small, large = (0, 1, 2, 3, 4, 63, 64, 299, 300, 301), (2**16, 2**20, 2**24, 2**31 - 1)
    values[rng.choice(_CONFIG_KEYS)] = rng.choice(rng.choice((_INTEGERS, small, large, (None, True, 1.0, "4"))))


def _option(rng: Random, values: dict[str, Any]) -> None:
    numbers = (*_INTEGERS, *_NUMBERS)
    values[rng.choice(_OPTIONS)] = rng.choice(
        (
            rng.choice(numbers),
            rng.choice(numbers),
            odd_value(rng),
            True,
            [rng.choice(numbers)],
            list(range(300)),
            _mark(rng),
        )
    )


_CONFIG_WAYS: dict[str, Callable[[Random, dict[str, Any]], None]] = {"number of the configuration": _config_number}
_OPTION_WAYS: dict[str, Callable[[Random, dict[str, Any]], None]] = {"option": _option}
