"""Continue prompts with a portable bundle in onnxruntime-genai, as its users would. JSON in, JSON out."""

from __future__ import annotations

import json
import sys

import onnxruntime_genai as og

folder, job = sys.argv[1], json.load(sys.stdin)
model = og.Model(folder)
tokenizer = og.Tokenizer(model)


def continued(text: str) -> tuple[list[int], list[int]]:
    prompt = [int(token_id) for token_id in tokenizer.encode(text)]
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + job["max_new_tokens"])
    generator = og.Generator(model, params)
    generator.append_tokens(prompt)
    while not generator.is_done():
        generator.generate_next_token()
    return prompt, [int(token_id) for token_id in generator.get_sequence(0)][len(prompt) :]


def continued_together(texts: list[str], longest: int) -> list[list[int]]:
    """Continue a batch, whose rows are padded on the right up to the `longest` prompt."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=longest + job["max_new_tokens"], batch_size=len(texts))
    generator = og.Generator(model, params)
    generator.append_tokens(tokenizer.encode_batch(texts))
    while not generator.is_done():
        generator.generate_next_token()
    return [[int(token_id) for token_id in generator.get_sequence(row)][longest:] for row in range(len(texts))]


solo = [continued(text) for text in job["texts"]]
batch = continued_together(job["texts"], max(len(prompt) for prompt, _ in solo))
json.dump({"prompts": [prompt for prompt, _ in solo], "solo": [ids for _, ids in solo], "batch": batch}, sys.stdout)
