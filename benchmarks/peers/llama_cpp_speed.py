"""llama.cpp for `benchmarks/compare.py`, through its C interface: one decode and one argmax a step."""

from __future__ import annotations

import ctypes
from pathlib import Path

import llama_cpp
from llama_cpp_model import convert
from worker import Clock, Ids, main


class Model:
    def __init__(self, path: Path, format_name: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        assert self.model, f"llama.cpp cannot open {path}"
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.threads = threads
        self.contexts: dict[int, object] = {}
        self.sampler = llama_cpp.llama_sampler_init_greedy()

    def _context(self, rows: int) -> object:
        """Return the context for this number of rows, each as long as the model allows."""
        if rows not in self.contexts:
            params = llama_cpp.llama_context_default_params()
            params.n_ctx, params.n_seq_max = 1024 * rows, rows
            params.n_batch = params.n_ubatch = 1024
            params.n_threads = params.n_threads_batch = self.threads
            self.contexts[rows] = llama_cpp.llama_init_from_model(self.model, params)
        return self.contexts[rows]

    def generate(self, prompts: Ids, new_tokens: int) -> tuple[Ids, float, float]:
        rows = range(len(prompts))
        context = self._context(len(prompts))
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        batch = llama_cpp.llama_batch_init(1024 * len(prompts), 0, 1)
        ids: Ids = [[] for _ in rows]
        clock = Clock()
        inputs = [list(prompt) for prompt in prompts]
        start = 0
        for _ in range(new_tokens):
            # The tokens with logits come last, so their outputs have the numbers of the rows.
            before = [(row, place, token) for row in rows for place, token in enumerate(inputs[row][:-1])]
            last = [(row, len(inputs[row]) - 1, inputs[row][-1]) for row in rows]
            places = before + last
            for first in range(0, len(places), 1024):
                part = places[first : first + 1024]
                for slot, (row, place, token) in enumerate(part):
                    batch.token[slot], batch.pos[slot] = token, start + place
                    batch.n_seq_id[slot], batch.seq_id[slot][0] = 1, row
                    batch.logits[slot] = first + slot >= len(before)
                batch.n_tokens = len(part)
                assert llama_cpp.llama_decode(context, batch) == 0
            offset = batch.n_tokens - len(last)
            for row in rows:
                ids[row].append(llama_cpp.llama_sampler_sample(self.sampler, context, offset + row))
            clock.tick()
            start += len(inputs[0])
            inputs = [[row[-1]] for row in ids]
        seconds = clock.split()
        llama_cpp.llama_batch_free(batch)
        return ids, *seconds

    def first_token(self, text: str) -> str:
        data = text.encode()
        tokens = (llama_cpp.llama_token * (len(data) + 1))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, len(tokens), False, False)
        ids, _, _ = self.generate([list(tokens[:count])], 1)
        piece = (ctypes.c_char * 64)()
        length = llama_cpp.llama_token_to_piece(self.vocab, ids[0][0], piece, len(piece), 0, True)
        return piece.raw[:length].decode(errors="replace")


if __name__ == "__main__":
    main(convert, Model)
