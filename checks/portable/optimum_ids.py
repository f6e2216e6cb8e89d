"""Continue prompts with a portable bundle in Hugging Face Optimum, as its users would. JSON in, JSON out."""

from __future__ import annotations

import json
import sys

import torch
from optimum.onnxruntime import ORTModelForCausalLM
from transformers import AutoTokenizer

folder, job = sys.argv[1], json.load(sys.stdin)
model = ORTModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
tokenizer.pad_token = tokenizer.eos_token
settings = {"max_new_tokens": job["max_new_tokens"], "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
model.generation_config.eos_token_id = None


def continued(texts: list[str]) -> list[list[int]]:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    with torch.no_grad():
        ids = model.generate(**inputs, **settings)
    return [row[inputs.input_ids.shape[1] :].tolist() for row in ids]


json.dump(
    {
        "prompts": [tokenizer(text).input_ids for text in job["texts"]],
        "solo": [continued([text])[0] for text in job["texts"]],
        "batch": continued(job["texts"]),
    },
    sys.stdout,
)
