"""`transformers` for `benchmarks/compare.py`; optimum_speed.py uses the same loop with another model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer
from worker import Clock, Ids, main


def convert(checkpoint: Path, work: Path) -> dict[str, Path]:
    return {"float32": checkpoint}


class Streamer(BaseStreamer):  # type: ignore[misc]  # taken as Any
    def __init__(self, clock: Clock) -> None:
        self.clock, self.calls = clock, 0

    def put(self, value: Any) -> None:
        self.calls += 1
        if self.calls > 1:  # the first is the prompt
            self.clock.tick()

    def end(self) -> None:
        pass


class Model:
    def __init__(self, path: Path, format_name: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.path = path
        self.model: Any = self.open(path, format_name, threads)

    def open(self, path: Path, format_name: str, threads: int) -> Any:
        return AutoModelForCausalLM.from_pretrained(path).eval()

    @torch.no_grad()
    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        inputs = torch.tensor(prompts)
        clock = Clock()
        output = self.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0, eos_token_id=None, streamer=Streamer(clock),
        )  # fmt: skip
        return output[:, inputs.shape[1] :].tolist(), *clock.split()

    def first_token(self, text: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(self.path)
        ids, _, _ = self.generate([tokenizer(text)["input_ids"]], 1)
        return str(tokenizer.decode(ids[0]))


if __name__ == "__main__":
    main(convert, Model)
